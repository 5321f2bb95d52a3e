"""A user's project with folders of our names, trained by transom with spawned workers."""

import sys
from pathlib import Path

import ckpt_engine
import ingest
import torch
import ui
from torch.utils.data import DataLoader

import transom


def main():
    run = transom.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(
        ingest.Numbers(run), batch_size=2, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    loader = transom.watch(model, optimizer, loader)
    checkpointer = transom.Checkpointer()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    step = 0
    for _ in range(2):
        for batch in loader:
            step += 1
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(step=step, loss=loss)
    state["step"] = step
    assert not checkpointer.save(state, step).failed
    state["step"] = 0
    assert checkpointer.load(into=state, step=step).tier == "disk"
    assert state["step"] == step
    here = Path(__file__).parent
    for room in (ingest, ui, ckpt_engine):
        assert Path(room.__file__).is_relative_to(here), room.__file__
    assert not {"detectors", "recovery", "pipelines"} & sys.modules.keys()
    print("trained", step)


if __name__ == "__main__":
    main()
