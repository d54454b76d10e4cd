"""Which rollouts share a forward pass: as few packs as fit the token budget, about equally full.

First-fit decreasing bounds how many packs are needed (at most 11/9 of the optimum plus 6/9,
Dosa 2007). Then, from the smallest number that could hold all tokens upwards, each rollout goes,
longest first, to the emptiest pack: the first number for which that fits wins, because equally
full packs take equally long. If none below the bound fits, the first-fit packs stand.

The result depends on the lengths alone, so cutting a batch elsewhere changes only which of two
equally long rollouts sits where.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

Packs = tuple[tuple[int, ...], ...]


def pack_rollouts(lengths: Sequence[int], max_tokens: int) -> Packs:
    """Put R rollouts of `lengths` tokens into packs of at most `max_tokens`, longest first in each.

    Every index is in exactly one pack. A rollout longer than the budget has a pack to itself.

    Example: pack_rollouts([3, 9, 4, 3], 7) -> ((1,), (2,), (0, 3)).

    Raises: ValueError for a length or a budget below 1.
    """
    if max_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError("a rollout and the token budget have at least one token")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = tuple((index,) for index in order if lengths[index] > max_tokens)
    rest = order[len(alone) :]
    if not rest:
        return alone
    return alone + _pack_evenly(lengths, rest, max_tokens)


def _pack_evenly(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> Packs:
    """Use the smallest number of packs for which emptiest-first fits, else first-fit's packs."""
    fewest = -(-sum(lengths[index] for index in order) // max_tokens)
    if fewest == 1:
        return (tuple(order),)
    first_fit = _first_fit(lengths, order, max_tokens)
    for num_packs in range(fewest, len(first_fit) + 1):
        packs = _emptiest_first(lengths, order, num_packs)
        if all(sum(lengths[index] for index in pack) <= max_tokens for pack in packs):
            return packs
    return first_fit


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> Packs:
    """Put each rollout into the first pack with room; `order` is longest first."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        place = next((place for place, left in enumerate(room) if left >= length), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[place].append(index)
        room[place] -= length
    return tuple(map(tuple, packs))


def _emptiest_first(lengths: Sequence[int], order: Sequence[int], num_packs: int) -> Packs:
    """Put each rollout into the pack with the fewest tokens; `order` is longest first."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    fill = [(0, place) for place in range(num_packs)]
    heapify(fill)
    for index in order:
        tokens, place = fill[0]
        packs[place].append(index)
        heapreplace(fill, (tokens + lengths[index], place))
    return tuple(map(tuple, packs))
