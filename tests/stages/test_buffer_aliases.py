"""Buffers that share memory; ``tests/pipeline/test_state.py`` and ``test_methods.py`` run such programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.program import shares_memory
from arm_recipes.stages.capture.buffer_aliases import (
    describe_unshareable_buffer,
    mark_read_state_as_mutated,
    merge_buffer_aliases,
)

BASE = torch.zeros(4, 6)
ARRAY = torch.zeros(8).numpy()


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (BASE, BASE[1], True),
        (BASE[:2], BASE[2:], False),
        (BASE[:, ::2], BASE[:, 1::2], False),
        (BASE[:, 2:4], BASE.T[3], True),
        (BASE[0, :1].expand(5), BASE[:, 0], True),
        (BASE[0].view(torch.int16)[1:2], BASE[0, 0], True),
        (torch.from_numpy(ARRAY[:4]), torch.from_numpy(ARRAY[3:]), True),
        (BASE[:0], BASE, False),
        (BASE, BASE.clone(), False),
    ],
)
def test_share_memory_compares_bytes(first: Tensor, second: Tensor, shared: bool) -> None:
    assert shares_memory(first, second) is shares_memory(second, first) is shared


class Named(nn.Module):
    """One buffer under two names; written if ``writes``."""

    one: Tensor
    other: Tensor

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", self.one)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.other.add_(x)
        return self.one * self.other


@pytest.mark.parametrize("writes", [False, True])
def test_names_are_merged_if_the_buffer_is_written(writes: bool) -> None:
    program = torch.export.export(Named(writes), (torch.ones(4),))
    unified = merge_buffer_aliases(program)
    assert (unified is not program) is writes
    assert list(unified.state_dict) == (["one"] if writes else ["one", "other"])
    assert list(program.state_dict) == ["one", "other"]
    assert describe_unshareable_buffer({"forward": unified}) is None


class Reading(nn.Module):
    """Reads a buffer, and adds to it if ``writes``."""

    state: Tensor

    def __init__(self, state: Tensor, writes: bool) -> None:
        super().__init__()
        self.register_buffer("state", state)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        y = self.state * x
        if self.writes:
            self.state.add_(x)
        return y


@pytest.mark.parametrize("writes", [False, True])
def test_write_read_state_adds_a_write_to_methods_that_only_read(writes: bool) -> None:
    state, x = torch.ones(4), (torch.ones(4),)
    programs = {name: torch.export.export(Reading(state, name == "write" and writes), x) for name in ("read", "write")}
    result = mark_read_state_as_mutated(programs)
    assert result["write"] is programs["write"]
    assert (result["read"] is programs["read"]) is not writes
    assert list(result["read"].graph_signature.buffers_to_mutate.values()) == (["state"] if writes else [])
    assert not programs["read"].graph_signature.buffers_to_mutate
    assert torch.equal(result["read"].module()(*x), state)
