"""What a group holds in memory is what a slot holds in bytes."""

from __future__ import annotations

from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.transport import slots


def test_every_array_of_a_group_has_its_place_in_a_slot():
    header = ("group_id", "problem", "epoch")
    assert TrajectoryGroup._fields == (*header, *(name for name, _ in slots._ARRAYS))
