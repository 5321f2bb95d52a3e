"""The user's own `ingest`: it reads his data."""

import torch
import transom
from torch.utils.data import Dataset

from ui import TITLE


class Numbers(Dataset):
    def __init__(self, run):
        self.run = run  # goes through pickle to every worker

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert TITLE == "the user's own"
        if torch.utils.data.get_worker_info() is not None:
            assert not self.run.active
            assert not transom.init().active
            self.run.log(step=666, loss=0.0)
        return torch.full((4,), float(index))
