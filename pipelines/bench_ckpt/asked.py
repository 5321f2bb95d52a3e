"""What is asked of the checkpoint engine: one line for each figure of `transom bench ckpt`."""

from __future__ import annotations

from pipelines.asked import Asked

ASKED = (
    Asked("ckpt.save_ratio", "stall of a steady save, the whole call ÷ memcpy", "≤", 1.25, "save"),
    Asked("ckpt.slower_than_peers", "peers that save faster, by a paired 95 % interval", "=", 0, "save"),
    Asked("ckpt.first_save_ratio", "first save ÷ steady save", "≤", 2, "save"),
    Asked("ckpt.vs_torch_save_fsync", "torch.save and fsync ÷ our save", "≥", 7, "save"),
    Asked("ckpt.vs_dcp_async", "dcp.async_save, default stager ÷ our save", "≥", 1.7, "save"),
    Asked("ckpt.fenced_ratio", "fenced save, the whole call ÷ memcpy", "≤", 0.10, "fenced"),
    Asked("ckpt.fence_wait_ratio", "wait in the fence ÷ memcpy, compute taking 3 memcpy or more", "≤", 0.02, "fenced"),
    Asked("ckpt.fenced_step_ratio", "whole training step with a fenced save ÷ one without", "≤", 1.1, "fenced"),
    Asked("ckpt.load_views_ratio", "load after kill -9, views, verified later ÷ memcpy", "≤", 0.1, "load"),
    Asked("ckpt.load_views_verified_ratio", "load after kill -9, views, verified first ÷ memcpy", "≤", 0.7, "load"),
    Asked("ckpt.load_inplace_ratio", "load after kill -9, in place, verified first ÷ memcpy", "≤", 1.7, "load"),
    Asked("ckpt.vs_torch_load_hot", "torch.load + load_state_dict, file cached ÷ ours in place", "≥", 2.5, "load"),
    Asked("ckpt.vs_torch_load_cold", "torch.load + load_state_dict, file not cached ÷ ours in place", "≥", 5, "load"),
    Asked("ckpt.persist_ratio", "rate of persisting ÷ rate of a plain write and fsync", "≥", 0.9, "persist"),
    Asked("ckpt.persist_step_inflation", "training step while persisting, two busy cores", "≤", 0.15, "persist"),
    Asked("ckpt.peer_restore_ratio", "load from a peer on loopback ÷ memcpy", "≤", 4, "peer"),
    Asked("ckpt.kills", "kill -9 of rank, engine, both and keeper at random instants", "≥", 200, "kills"),
    Asked("ckpt.torn", "loads after them that were not a whole step, bit for bit", "=", 0, "kills"),
    Asked("ckpt.saves_lost_max", "sealed saves lost by one kill, at the most", "≤", 1, "kills"),
    Asked("ckpt.engine_kill_lost", "saves that memory lost when only the engine was killed", "=", 0, "kills"),
    Asked("ckpt.flips_found", "share of 1-bit flips in memory, peer and disk found, next tier used", "=", 1, "flips"),
    Asked("ckpt.roundtrips", "made-up states that came back bit for bit", "≥", 1000, "roundtrips"),
    Asked("ckpt.growth_100_saves", "memory of engine and rank after 100 more saves, growth", "<", 0.01, "growth"),
    Asked("ckpt.dedup_ratio", "on disk, 4 data-parallel ranks ÷ 1; 4 → 2 → 3 ranks bit for bit", "≤", 1.05, "dedup"),
    Asked("ckpt.gpu_save_ratio", "save stall ÷ pinned copy from the device", "≤", 1.25, "gpu"),
)  # fmt: skip

GROUPS = tuple(dict.fromkeys(asked.group for asked in ASKED))
