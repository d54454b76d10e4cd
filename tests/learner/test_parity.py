"""The parity gate: refuses to train on another model's log-probabilities."""

from __future__ import annotations

import logging

import pytest
import torch

from asyncrl_node.errors import RunFault
from asyncrl_node.learner.parity import ParityGate


def scored(difference: float, count: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.arange(count)
    sampler = torch.full((count,), -1.0)
    learner = sampler.clone()
    learner[3] -= difference
    return tokens, sampler, learner


def test_rounding_passes_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = ParityGate(5e-5, 5e-5)
    gate.add(*scored(1e-6), [4] * 8)
    with caplog.at_level(logging.INFO):
        gate.check()
    assert gate.report is not None
    assert gate.report in caplog.text
    assert gate.report.startswith("parity gate (limits 5e-05 and 5e-05): log-probabilities of 8 ")
    assert "by 9.54e-07 at most and 1.19e-07 on average, per nat by 9.54e-07 and" in gate.report
    assert "; worst: token 3 of group 4" in gate.report
    gate.add(*scored(0.0), [5] * 8)
    first = gate.report
    gate.check()
    assert gate.report == first


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_a_larger_difference_is_refused_and_names_the_worst(difference: float) -> None:
    gate = ParityGate(5e-5, 5e-5)
    gate.add(*scored(0.0), [1] * 8)
    gate.add(*scored(difference), [2] * 8)
    with pytest.raises(RunFault, match=r"token 3 of group 2.*learner\.parity_limit") as caught:
        gate.check()
    assert caught.value.name == "parity"


def test_it_stays_closed_until_there_is_something_to_judge() -> None:
    gate = ParityGate(5e-5, 5e-5)
    gate.check()
    gate.add(*scored(1e-3), [2] * 8)
    with pytest.raises(RunFault, match="largest"):
        gate.check()


def test_later_a_single_token_may_be_far_and_all_of_them_may_not() -> None:
    """A sampler that goes on generating by old weights is far everywhere, in any later step."""
    gate = ParityGate(5e-5, 5e-5)
    gate.add(*scored(0.0), [1] * 8)
    gate.check()
    gate.add(*scored(6e-3, 256), [2] * 256)  # 2.3e-5 on average
    gate.check()
    gate.check()  # nothing new: what was judged is forgotten
    gate.add(*scored(4e-2, 255), [3] * 255)
    gate.check()  # too few for a mean
    gate.add(*scored(0.0, 1 + 3), [3] * 4)
    with pytest.raises(RunFault, match=r"token 3 of group 3.*average") as caught:
        gate.check()
    assert caught.value.name == "parity"


def test_none_switches_it_off() -> None:
    gate = ParityGate(None, None)
    gate.add(*scored(1.0), [1] * 8)
    gate.check()
    strict = ParityGate(0.4, None)
    strict.add(*scored(1.0), [1] * 8)
    with pytest.raises(RunFault):
        strict.check()


def test_an_unlikely_token_may_be_off_by_more() -> None:
    """Its logits are further apart, and so is what rounding leaves of them."""
    tokens = torch.arange(2)
    learner = torch.tensor([-1.0, -16.0])
    far = torch.tensor([0.0, 4e-4])
    gate = ParityGate(5e-5, 5e-5)
    gate.add(tokens, learner + far, learner, [1, 1])
    gate.check()
    gate = ParityGate(5e-5, 5e-5)
    gate.add(tokens, learner + far, learner, [1, 1])
    gate.add(tokens, learner + far.flip(0), learner, [2, 2])
    with pytest.raises(RunFault, match=r"worst: token 0 of group 2"):
        gate.check()


def test_what_only_one_side_finds_unlikely_is_far() -> None:
    """Over the larger |log-probability| it would never be more than 1."""
    tokens = torch.arange(8)
    likely, unlikely = torch.full((8,), -0.01), torch.full((8,), -50.0)
    for sampler, learner in ((likely, unlikely), (unlikely, likely)):
        gate = ParityGate(1.0, None)
        gate.add(tokens, sampler, learner, [1] * 8)
        with pytest.raises(RunFault, match=r"per nat by 5.00e\+01"):
            gate.check()
