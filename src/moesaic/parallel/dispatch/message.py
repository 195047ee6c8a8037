"""What ranks say to each other about rows: jobs sorted by destination, packed, and opened again.

    send      head | jobs (row, slot, choice) | weights | rows
    collect   head | results                     choices: one row a job, in the order of the jobs
              head | places | values             subtrees: the roots that the receiver's jobs filled

Knows neither transports nor experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Tag
from moesaic.parallel.tree import Subtrees
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, Numerics, wire_row_bytes

Returns = Literal["choices", "subtrees"]
HEAD = 8  # int32 in front of every message: the tag's six, then counts
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sorted:
    """Jobs by destination, then as they were given; each destination's rows once.

    Shapes:  order_J [J]: job as it stands here -> as it was given; row_J [J]: its row in the message to its
             destination; row_R [R]: rows of all messages, as they were given; jobs and rows by destination.
    """

    order_J: Tensor
    row_J: Tensor
    row_R: Tensor
    jobs: list[int]
    rows: list[int]


def sort_jobs(destination_J: Tensor, row_J: Tensor, num_destinations: int, num_rows: int) -> Sorted:
    """Which jobs and which of `num_rows` rows go where; `row_J` ascends."""
    to_J, order_J = torch.sort(destination_J, stable=True)
    # A destination and a row: both ascend, so equal ones stand together.
    key_R, message_row_J = torch.unique_consecutive(to_J * num_rows + row_J[order_J], return_inverse=True)
    rows = torch.bincount(key_R // max(num_rows, 1), minlength=num_destinations).tolist()
    jobs = torch.bincount(to_J, minlength=num_destinations).tolist()
    return Sorted(
        order_J=order_J,
        row_J=message_row_J - torch.repeat_interleave(starts(rows), torch.tensor(jobs)),
        row_R=key_R % max(num_rows, 1),
        jobs=jobs,
        rows=rows,
    )


def starts(sizes: Sequence[int]) -> Tensor:
    """[N] int64: where each of parts that follow each other begins."""
    ends = torch.tensor(sizes).cumsum(0)
    return ends - torch.tensor(sizes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Jobs:
    """The jobs of one message and the rows that they are about.

    Shapes:  row_J, slot_J, choice_J [J] int64; weight_J [J] float32; rows_RB [R, B] uint8: the rows
             as they travel.
    """

    row_J: Tensor
    slot_J: Tensor
    choice_J: Tensor
    weight_J: Tensor
    rows_RB: Tensor


def pack_jobs(tag: Tag, jobs: Jobs, by: Sorted) -> list[Tensor]:
    """The messages to all destinations: `jobs` sorted as `by`, their `row_J` the row in each message."""
    jobs_J3 = torch.stack((jobs.row_J, jobs.slot_J, jobs.choice_J), dim=1).to(torch.int32)
    return [
        pack(tag, (len(rows_RB), len(jobs_J3)), jobs_J3, weight_J, rows_RB)
        for jobs_J3, weight_J, rows_RB in zip(
            jobs_J3.split(by.jobs), jobs.weight_J.split(by.jobs), jobs.rows_RB.split(by.rows), strict=True
        )
    ]


def open_jobs(message: Tensor, tag: Tag, *, row_bytes: int) -> Jobs:
    """What `pack_jobs` put into one message."""
    (num_rows, num_jobs), body = open_message(message, tag)
    ends = (12 * num_jobs, 16 * num_jobs)
    row_J, slot_J, choice_J = body[: ends[0]].view(torch.int32).view(num_jobs, 3).long().unbind(1)
    return Jobs(
        row_J=row_J,
        slot_J=slot_J,
        choice_J=choice_J,
        weight_J=body[ends[0] : ends[1]].view(torch.float32),
        rows_RB=body[ends[1] :].view(num_rows, row_bytes),
    )


def largest_messages(
    spec: MoeSpec, numerics: Numerics, returns: Returns, num_tokens: int, num_slices: int = 1
) -> tuple[int, int]:
    """Bytes of the largest message of a send and of a collect, between two ranks.

    All rows of a rank go to one other, with all their choices; of subtrees come back those that have no
    sibling there, at most every second choice of a token. Roots of slices are float32.

    Units:   `num_tokens` is the largest batch of a rank.
    """
    choices = num_tokens * spec.experts_per_token * num_slices
    sent = num_tokens * wire_row_bytes(numerics.wire_format, spec.row_width) + 16 * choices
    if numerics.combine == "tree" and returns == "choices":
        dtype = numerics.seam_dtype if num_slices == 1 else "float32"
        back = choices * spec.row_width * DTYPE_BYTES[dtype]
    else:
        partial = spec.row_width * DTYPE_BYTES[numerics.partial_dtype]
        is_tree = numerics.combine == "tree"
        back = num_tokens * (-(-spec.experts_per_token // 2) * (12 + partial) if is_tree else partial)
    return 4 * HEAD + sent, 4 * HEAD + back


def pack_roots(tag: Tag, roots: Subtrees) -> Tensor:
    """Roots of subtrees; their tokens are rows of the message that they answer."""
    places_Q3 = torch.stack((roots.token_Q, roots.level_Q, roots.node_Q), dim=1).to(torch.int32)
    return pack(tag, (len(places_Q3), 0), places_Q3, roots.value_QD)


def open_roots(message: Tensor, tag: Tag, token_R: Tensor, *, partial: torch.dtype, width: int) -> Subtrees:
    """What `pack_roots` packed, as roots of `token_R`, the tokens of the rows."""
    (num_roots, _), body = open_message(message, tag)
    row_Q, level_Q, node_Q = body[: 12 * num_roots].view(torch.int32).view(num_roots, 3).long().unbind(1)
    value_QD = body[12 * num_roots :].view(partial).view(num_roots, width)
    return Subtrees(token_Q=token_R[row_Q], level_Q=level_Q, node_Q=node_Q, value_QD=value_QD)


def pack(tag: Tag, counts: tuple[int, int], *parts: Tensor) -> Tensor:
    """[bytes] uint8: a head that says what this is, and the parts back to back."""
    head = torch.tensor([*_fields(tag), *counts], dtype=torch.int32)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (head, *parts)])


def open_message(message: Tensor, tag: Tag) -> tuple[tuple[int, int], Tensor]:
    """The counts and the body of a message.

    Raises: ConfigError when the sender was elsewhere than this rank.
    """
    *fields, first, second = message[: 4 * HEAD].view(torch.int32).tolist()
    if fields != _fields(tag):
        raise ConfigError(f"ranks are out of step: this rank is at {tag}, another sent for {fields}")
    return (first, second), message[4 * HEAD :]


def bundle(messages: Sequence[Tensor]) -> Tensor:
    """Several messages as one, their lengths first."""
    lengths = torch.tensor([message.numel() for message in messages], dtype=torch.int64)
    return torch.cat((lengths.view(torch.uint8), *messages))


def unbundle(message: Tensor, count: int) -> list[Tensor]:
    """The `count` messages of a bundle."""
    lengths = message[: 8 * count].clone().view(torch.int64).tolist()  # a copy stands at a multiple of 8
    return list(message[8 * count :].split(lengths))


def addressed(messages: dict[int, Tensor], num_ranks: int) -> list[Tensor]:
    """One message a rank; those that are not named get none of any bytes."""
    return [messages.get(rank, _NO_BYTES) for rank in range(num_ranks)]


def _fields(tag: Tag) -> list[int]:
    return [tag.epoch, tag.plan_version, tag.step_id, tag.micro_batch, tag.chunk, tag.layer_idx]
