"""Log lines to judge the rules by: what healthy jobs print, and what broken ones did, made anonymous."""

# ruff: noqa: E501 - log lines are as long as they are

from __future__ import annotations

BENIGN = """
iteration      100/  500000 | consumed samples:         4000 | elapsed time per iteration (ms): 5379.8 | learning rate: 2.269E-05 | global batch size:     8 | lm loss: 6.456435E+00 | loss scale: 131072.0 | grad norm: 2.450 | number of skipped iterations:   3 | number of nan iterations:   0 |
 [2025-01-02 03:04:05] iteration       10/     100 | consumed samples: 80 | elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 412.1 | learning rate: 1.0E-4 | lm loss: 8.1E+00 | grad norm: 1.234 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |
{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.4}
{'loss': 8.2, 'grad_norm': inf, 'learning_rate': 0.0, 'epoch': 0.0}
{'eval_loss': 1.9, 'eval_runtime': 12.3, 'eval_samples_per_second': 91.2, 'epoch': 1.0}
{'train_runtime': 1234.5, 'train_samples_per_second': 3.2, 'train_loss': 1.2, 'epoch': 3.0}
Epoch 3:  45%|████▌     | 450/1000 [01:23<01:41,  5.42it/s, v_num=0, train_loss=2.310]
  5%|▌         | 1021/20000 [45:39<51:20:53,  1.87s/it]
Downloading shards:   0%|          | 0/7 [00:00<?, ?it/s]
steps: 10 loss: 2.3101 iter time (s): 0.812 samples/sec: 39.4
[2024-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]
[2024-01-01 10:00:00,124] [INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=39.2, CurrSamplesPerSec=39.4, MemAllocated=12.1GB, MaxMemAllocated=18.2GB
[2024-01-01 10:00:01,124] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4294967296, reducing to 2147483648
iter 100: loss 3.2101, time 101.23ms, mfu 31.20%
step 2000: train loss 2.1040, val loss 2.3021
[rank0]:[titan] 2024-12-03 10:00:00,123 - root - INFO - step: 10  loss:  8.1234  grad_norm: 1.2 memory: 30.12GiB(31.70%)  tps: 1,234  mfu: 41.20%
2024-01-01 10:00:00 | INFO | train_inner | epoch 001:    100 / 1000 loss=5.6, ppl=48.5, wps=1000, ups=2.1, wpb=400, bsz=32, num_updates=100, lr=0.0001, gnorm=1.2, loss_scale=128, train_wall=10, wall=120
Epoch(train) [1][50/1000]  lr: 1.0000e-03  eta: 1:02:03  time: 0.3101  data_time: 0.0101  loss: 1.2011  grad_norm: 3.1
Training epoch 0, iteration 10/99 | lr: 0.0003 | global_batch_size: 512 | global_step: 10 | reduced_train_loss: 10.31 | train_step_timing in s: 3.2 | consumed_samples: 5632
node0:1:2 [0] NCCL INFO Connected all rings
8h200-2:6831:6840 [0] NCCL INFO TUNER/Plugin: Failed to find ncclTunerPlugin_v3 symbol.
ip-10-36-29-253:79:79 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.
node1:77:99 [0] NCCL INFO Failed to open libibverbs.so[.1]
node1:77:99 [0] NCCL INFO NET/IB : No device found.
node1:77:99 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
node1:77:99 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
node1:77:99 [0] NCCL INFO NCCL_IB_RETRY_CNT set by environment to 7.
node1:77:99 [0] NCCL INFO TORCH_NCCL_ASYNC_ERROR_HANDLING: 1
I1002 15:18:51.080338 1822032 ProcessGroupNCCL.cpp:530] [Rank 1] NCCL watchdog thread terminated normally
[rank0]:[I1002 15:18:51.080338 ProcessGroupNCCL.cpp:852] [PG 0 Rank 0] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000, USE_HIGH_PRIORITY_STREAM: 0
timeout=1800s configured for process group; NCCL watchdog enabled
saving checkpoint at iteration 4000 to /ckpt in torch_dist format
  successfully saved checkpoint from iteration     400 to /ckpt [ t 1/8, p 1/1 ]
WARNING: checkpoint sharding mismatch tolerated, resharding from tp=4 to tp=8
WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt
    will not load any checkpoints and will start from random
loss scale: 65536.0 | nan count 0 | inf count 0
nfs: server 10.0.0.16 OK
  error_if_nonfinite .............................. False
  check_for_nan_in_loss_and_grad .................. True
  exit_on_missing_checkpoint ...................... False
  distributed_timeout_minutes ..................... 10
  nccl_communicator_config_path ................... None
  rerun_mode ...................................... validate_results
  log_memory_to_tensorboard ....................... False
  use_checkpoint_args ............................. False
Namespace(lr=0.0003, timeout=1800, error_if_nonfinite=True, nan_check=True, max_retries=5, on_error='raise', save='/ckpt')
TrainingArguments(debug=[], fp16=False, ignore_data_skip=False, logging_nan_inf_filter=True, skip_memory_metrics=True, torch_compile=False)
retry 1/5 after ConnectionResetError: [Errno 104] Connection reset by peer
WARNING:urllib3.connectionpool:Retrying (Retry(total=2, connect=None, read=None, redirect=None, status=None)) after connection broken by 'ReadTimeoutError("HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)")': /api/models
INFO: download of shard 7 failed with ReadTimeout, retrying in 4 s (attempt 2/5)
upload of checkpoint 400 succeeded after 2 retries (botocore.exceptions.ReadTimeoutError)
wandb: Network error (ConnectionError), entering retry loop.
wandb: WARNING Step cannot be set when using tensorboard syncing.
0 errors, 12 warnings
no CUDA errors so far, ECC errors: 0
ECC errors, uncorrectable: 0
GPU 0: HW Thermal Slowdown: Not Active
retired pages: 0, remapped rows: 0, pending: no
/opt/conda/lib/python3.11/site-packages/torch/utils/checkpoint.py:429: UserWarning: torch.utils.checkpoint: please pass in use_reentrant=True or use_reentrant=False explicitly.
FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated. Please use `torch.amp.GradScaler('cuda', args...)` instead.
[W socket.cpp:663] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 22 - Invalid argument), retrying.
[W CUDAGuardImpl.h:115] Warning: CUDA warning: driver shutting down (function destroyEvent)
[W reducer.cpp:1389] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.
Warning: the dataset has 3 corrupted samples, skipping them
skipping sample 812: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff
ImportError: cannot import name 'fused_adam'; falling back to torch.optim.AdamW
WARNING:root:caught ValueError in sample 17 and went on
this run tolerates a ValueError in a sample and goes on
I1126 10:00:00 information about infinity norms: nanobatch 4
Killed 0 stale jobs; no CUDA errors so far
W0219 12:09:28.313000 140145133409408 torch/distributed/run.py:757] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded
INFO:torch.distributed.elastic.agent.server.api:[default] Starting worker group
[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.
mlx5_core 0000:3b:00.0 ens1f0np0: Link up
IPv6: ADDRCONF(NETDEV_CHANGE): ens1f0np0: link becomes ready
nvidia 0000:3b:00.0: enabling device (0000 -> 0002)
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.127.05
nvidia-uvm: Loaded the UVM driver, major device number 510.
EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode. Opts: (null)
XFS (nvme1n1): Mounting V5 Filesystem
Lustre: scratch-MDT0000-mdc: Connection restored to 10.0.0.9@o2ib
systemd[1]: Started Session 4 of user root.
audit: type=1400 audit(1700000000.123:45): apparmor="STATUS" operation="profile_load"
docker0: port 1(veth1) entered forwarding state
perf: interrupt took too long (2512 > 2500), lowering kernel.perf_event_max_sample_rate to 79500
TCP: request_sock_TCP: Possible SYN flooding on port 29500. Sending cookies.
evaluating checkpoint at step 4000: accuracy 71.2 %, error rate 28.8 %
eval: 512 samples, 0 failures, exact match 0.71
word error rate: 0.12
mean absolute error: 0.03
max abs error 1e-5 between fused and reference kernel
loss mask has 0 invalid tokens
Input length (max_length=512) exceeds the model's limit, truncating
Token indices sequence length is longer than the specified maximum sequence length for this model (812 > 512). Running this sequence through the model will result in indexing errors
Some weights of the model checkpoint were not used when initializing BertModel: ['cls.predictions.bias']
Some weights of LlamaForSequenceClassification were not initialized from the model checkpoint and are newly initialized: ['score.weight']
Loading checkpoint shards: 100%|██████████| 7/7 [00:10<00:00,  1.5s/it]
Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.
Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
memory budget: activations 12.1 GiB, optimizer 23.9 GiB, out of 80 GiB
To avoid out of memory errors set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
the fault tolerance layer (max_restarts=3) is on; node failures are survived
torch.distributed.elastic: rendezvous completed, 8 nodes, timeout 900 s
Ray cluster: 8 nodes alive, 0 dead
(WorkerDict pid=32167) [2025-12-17 14:10:28] model.py:649 - step 11: {'train/loss': -6.05359673500061e-09, 'train/pg_loss': -6.05e-09, 'train/grad_norm': 0.0798, 'train/step': 11}
step:12 - global_seqlen/min:1024 - actor/pg_loss:0.012 - actor/grad_norm:0.31 - timing_s/step:12.1
127.0.0.1 - - [03/Dec/2024 10:00:00] "GET /metrics HTTP/1.1" 200 -
slurmstepd: task_p_pre_launch: Using sched_affinity for tasks
srun: job 494583 has been allocated resources
Terminating the training loop after 1000 steps as configured
Exiting: reached max steps
Process finished with exit code 0
Killing old tensorboard
closing connection to the metrics server
WARNING connection pool is full, discarding connection: huggingface.co. Connection pool size: 10
[E] 0 tests failed
asyncio: Executing <Task> took 0.312 seconds
aborted 0 requests
early stopping: no improvement of val_loss in 3 epochs
Best val_loss: inf -> 2.31, saving
best_metric initialised to inf
min_loss=inf max_loss=-inf
initial best loss: inf
temperature: 0.7, top_p: 0.95
nan_to_num applied to attention mask
replaced 3 NaN values in column price by the median
pandas: column 'age' has 12 NaN values
NaN handling: masked
loss_nan_threshold: 3
model has infinite context? no
"timeout": 1800, "retry": {"max_attempts": 5, "errors": ["ConnectionError", "TimeoutError"]}
errors: 0
error_rate=0.0
step 12: error 0.003
validation error: 0.231
Validation loss: 2.31 | perplexity 10.1
DataLoader(num_workers=4, timeout=60, pin_memory=True)
Watching for Xid errors on 8 GPUs
DCGM health check: PASS (XID errors: 0, NVLink errors: 0)
ibstat: mlx5_0 State: Active, Physical state: LinkUp
link speed 400 Gb/s, symbol errors 0, link downed 0
all-reduce test passed, busbw 362 GB/s
Preflight: disk 81 % used, 1.2 TiB free
checkpoint 400 verified: 128 shards, checksums match
old checkpoint iter_0000200 removed
resuming from checkpoint at step 400
OSError was raised by the sample decoder 3 times; samples skipped
Traceback logging is enabled
assert_close passed
AssertionErrors in tests: 0
attempt 3 of 5 to reach the object store failed: EndpointConnectionError; trying again in 8 s
WARNING botocore.retryhandler: retry needed, retryable exception caught: ConnectTimeoutError; will retry
connection to 10.0.0.7:29500 refused, retrying (2/30)
NCCL WARN Call to connect returned Connection refused, retrying
checkpoint upload: 503 Slow Down, backing off 2.0 s
recovered from a transient read error on shard 81
ValueError in collate_fn ignored (sample 812)
sample 17: PIL.UnidentifiedImageError: cannot identify image file; skipping
CUDA out of memory with batch size 64, falling back to 32
auto batch size: RuntimeError: CUDA out of memory at 128, retrying with 64
Could not import apex (ModuleNotFoundError: No module named 'apex'), falling back to native AMP
loss spike detector armed, threshold 3.0, nan policy: skip
on_nan: rollback, on_inf: skip, max_nan_steps: 5
grad_scaler found_inf=0.0 scale=65536.0
ExceptionHandler registered for SIGTERM, SIGUSR1
Signal handlers: SIGTERM -> save and exit, SIGKILL cannot be handled
faulthandler is on, SIGSEGV dumps all stacks
max_restarts=3 monitor_interval=0.1 timeout=1800 rdzv_timeout=900
heartbeat_timeout: 600, watchdog: enabled, dump_on_timeout: true
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800 TORCH_NCCL_ENABLE_MONITORING=1
out_of_memory_retries: 0
evicted 12 entries from the tokenizer cache
killed worker pool of finished epoch
dropped the last incomplete batch of epoch 3
detected 8 GPUs, 0 with errors
detected capabilities: bf16, fp8
stalled for data 0.0 s of 12.3 s
no stragglers detected in the last 100 steps
health check: fabric manager is running, NVLink 18/18 up, Xid 0
nvidia-smi: 8 devices found
link up on mlx5_0 port 1, speed 400 Gb/s
all 512 ranks reached the barrier in 0.2 s
shutting down cleanly: all work is done
Training completed. Do not forget to share your model on huggingface.co/models =)
***** Running training *****
  Num examples = 52,002
  Total train batch size (w. parallel, distributed & accumulation) = 128
Saving model checkpoint to /ckpt/checkpoint-500
Model weights saved in /ckpt/checkpoint-500/model.safetensors
[2024-05-01 10:00:00,123] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving /ckpt/global_step500/mp_rank_00_model_states.pt...
[after training is done] datetime: 2024-05-01 10:00:00
validation loss at iteration 1000 | lm loss value: 2.301234E+00 | lm loss PPL: 9.986540E+00 |
(min, max) time across ranks (ms):
    save-checkpoint ................................: (383764.98, 383765.08)
rerun_state_machine: validation of iteration 100 passed
weights are in sync across data-parallel ranks
param hash check passed on 64 ranks
GPU memory: allocated 41.2 GiB, reserved 60.1 GiB, free 19.0 GiB, out of memory events 0
host memory: 812 GiB of 2,014 GiB used, oom kills 0
filesystem /ckpt: 81 % full, quota 40 TiB
s3: 512 objects uploaded, 0 errors, 3 retries
DNS: node-0 resolves to 10.0.0.7
port 29500 is free
requests 2.32.3, urllib3 2.2.1, botocore 1.35.0
errors='ignore', strict=False, on_error=None
error handling: retry up to 3 times
printing config: {'fail_on_nan': True, 'oom_kill_disable': False, 'segfault_handler': True}
epoch 3 step 1200: loss=2.1012 lr=1.2e-05 tokens/s=12345
Train Epoch: 3 [12800/60000 (21%)]\tLoss: 0.212345
Epoch 0/9 ━━━━━━━━━━━━━━━━ 45/100 0:00:12 • 0:00:15 3.61it/s v_num: 0 train_loss: 2.3
100%|██████████| 938/938 [00:12<00:00, 75.12it/s, loss=0.123]
Map:  45%|████▌     | 23400/52002 [00:12<00:15, 1893.12 examples/s]
1.2MB [00:01, 1.1MB/s]
If the loss is NaN, lower the learning rate
no NaN detected in gradients of 512 tensors
0 non-finite values found in the batch
DEBUG: KeyError: 'scheduler' (default used)
INFO - ValueError in the optional sanity check: None
node1:77:99 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory : when loading libnccl-net.so
W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory
GPU temperature 65 C, below critical 90 C
HCCL timeout set to 1800 s
NCCL error handling: asynchronous
TCPStore created on node-0:29500 with timeout 900 s
checkpoint scan: no corrupted files, 0 incomplete
vocab size 50257 is not divisible by 128, padding to 50304
0 validation errors for TrainConfig
jobs in this partition can be preempted by higher priority jobs
requeue_on: [NODE_FAIL, PREEMPTED, OUT_OF_MEMORY]
node 3 is down to 40 % of its memory
Port 29500 is in use, trying port 29501 instead
INFO: address already in use on 6006, TensorBoard takes 6007
[2024-05-01 10:00:00] [INFO] CUDA out of memory guard is armed at 95 %
I0501 10:00:00.123456 4141 ProcessGroupNCCL.cpp:852] [Rank 0] Timeout at NCCL work is 1800000 ms
""".strip("\n").split("\n")

# (line, id of the rule that must take it): each shape from another public report or driver than the rules' own lines
REAL: list[tuple[str, str]] = [
    ("[1,23]<stdout>:ip-10-0-0-9:72593:73427 [7] create_nccl_ofi_component:459 NCCL WARN NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument", "efa"),
    ("nccl_net_ofi_domain_get_ep:969 NCCL WARN NET/OFI Creating new endpoint for domain 0x7f9b failed: Invalid argument", "efa"),
    ("NET/IB : Got completion from peer with error 5, opcode 0, len 5384, vendor err 249 (Send)", "nccl_ib_flush"),
    ("task-7:73:95 [0] transport/net_ib.cc:881 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129", "nccl_ib"),
    ("1021/100000 [45:39<51:20:53,  1.87s/it][rank2]:[E723 01:58:45.510486595 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=45390)", "nccl_timeout"),
    ("  what():  [PG 3 Rank 5] Process group watchdog thread terminated with exception: [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141)", "nccl_timeout"),
    ("[rank2]:[E723 01:58:45.54 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from this local rank", "nccl_timeout"),
    ("EI0002: [PID: 2969] 2025-10-11-15:09:34 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank: [24].", "nccl_timeout"),
    ("ncclInternalError: Internal check failed.", "nccl_sys"),
    ("[rank1]: RuntimeError: InnerRunOpApi:OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6", "nccl_sys"),
    ("Bootstrap : no socket interface found", "nccl_usage"),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.", "host_oom"),
    ("srun: error: node-01-01: task 4: Out Of Memory", "host_oom"),
    ("node-3 kernel: [123.4567] Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB", "host_oom"),
    ("slurmstepd: error: *** STEP 3495064.0 ON node-01 CANCELLED AT 2021-10-27T19:35:36 ***", "cancelled"),
    ("srun: error: node-18-69: task 289: Bus error", "sigbus"),
    ("/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py", "sigkill"),
    ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", "sigkill"),
    ("192.0.2.7: [2023-10-13 11:31:28,593] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python'] exits with return code = -6", "sigabrt"),
    ("  what():  CUDA error: initialization error", "cuda_init"),
    ("E0000 00:00:1700000000.123456 cuda_driver.cc:1 failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected", "cuda_init"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`", "cuda_launch"),
    ("[2025-06-25 10:45:23] NCCL WARN Cuda failure 2 'out of memory'", "cuda_oom"),
    ("RuntimeError: storage has wrong size: expected 0 got 512", "ckpt_corrupt"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "dl_bus"),
    ("Loss is nan, stopping training", "nan"),
    ("iteration     5427/  250000 | consumed samples:  43416 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   0 |", "nan"),
    ("2023-10-24 08:07:20,024 - mmdet - INFO - Epoch [7][5900/32025] lr: 7.147e-04, time: 0.775, loss: nan, grad_norm: nan", "nan"),
    ("(WorkerDict pid=32167) [2025-12-17 14:10:28] model.py:649 - step 11: {'train/loss': nan, 'train/grad_norm': 0.0798}", "nan"),
    ("Jun  3 11:02:07 gpu-17 kernel: amdgpu 0000:0b:00.0: amdgpu: GPU reset begin!", "amd_reset"),
    ("[  267.045903] NVRM: kfspPollForResponse_IMPL: FSP command timed out", "rm_init"),
    ("<4>[  307.063915] nvme 0001:01:00.0: Failed status: 0xffffffff, reset controller.", "block_dev"),
    ("<4>[  308.550268] EXT4-fs warning (device nvme0n1): ext4_end_bio:314: I/O error -5 writing to inode 22413351", "block_dev"),
    ("LustreError: 137-5: scratch-OST0001_UUID: not available for connect from 10.0.0.7@o2ib (no target)", "nfs"),
    ("i40e 0000:5e:00.0 eno1: NIC Link is Down", "mlx_cable"),
    ("[Wed Sep 26 00:34:02 2018] mlx5_core 0000:3b:00.0 ens1f0np0: Link down", "mlx_cable"),
    ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "rdzv"),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (036c, 41331).", "rdzv"),
    ("(raylet, ip=10.0.0.9) A worker died or was killed while executing a task by an unexpected system error.", "ray_actor"),
    ("exit_type = NODE_OUT_OF_MEMORY, exit_detail = Task was killed due to the node running low on memory.", "host_oom"),
    ("worker-3  | 2024-05-01T10:00:00.123456789Z OSError: [Errno 116] Stale file handle", "stale_fh"),
    ("2024-05-01T10:00:00.123456789Z stderr F RuntimeError: CUDA error: device-side assert triggered", "cuda_assert"),
    ("3: slurmstepd: error: *** JOB 7 ON node2 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***", "timelimit"),
    ("\x1b[31m[rank7]:\x1b[0m ModuleNotFoundError: No module named 'apex'", "import"),
    ("ERROR:root:ValueError: bad shape", "pyexc"),
    ("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): retries exhausted, giving up", "s3"),
]  # fmt: skip
