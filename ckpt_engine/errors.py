"""What can go wrong with a checkpoint, said so that the caller knows what to do.

CheckpointError
├── CheckpointNotFound   no tier has it; the text names what there is instead
├── CheckpointDamaged    it is there, but its bytes are not what was saved
├── StateMismatch        it is whole, but does not fit the state it should be loaded into
├── NoAgreement          the ranks of a job did not come to one step: one of them is missing, or has another view
├── StepTaken            this attempt has saved that step already, and steps only grow within an attempt
├── EngineUnavailable    the engine does not answer: certainly or possibly no effect, ask again later
└── EngineRefused        the engine answered no; asking the same again will not help
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base; the text is one sentence."""


class CheckpointNotFound(CheckpointError):
    pass


class CheckpointDamaged(CheckpointError):
    pass


class StateMismatch(CheckpointError):
    pass


class NoAgreement(CheckpointError):
    pass


class StepTaken(CheckpointError):
    pass


class EngineUnavailable(CheckpointError):
    pass


class EngineRefused(CheckpointError):
    pass
