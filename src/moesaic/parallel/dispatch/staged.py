"""Routed experts as four verbs: send, receive, reply, collect. The only order in which they are ever called.

Knows neither where experts are nor how rows travel; whatever waits, yields.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import ExpertFfn, ExpertSide, RoutedExperts, Routing, Tag, TokenSide
from moesaic.parallel.meter import Meter
from moesaic.steps import Steps


class Staged(RoutedExperts):
    """Routed experts through a dispatcher's two sides.

    In several chunks the rows are sent in so many parts, all before the first is waited for: the first part
    is computed while the others travel. Every rank must use the same number.
    """

    def __init__(
        self,
        *,
        tokens: TokenSide,
        experts: ExpertSide,
        ffn: ExpertFfn,
        num_chunks: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`num_chunks` None: as the token side says; `meter` gets the time of the four verbs, and the jobs.

        Raises: ConfigError for no chunks.
        """
        if num_chunks is not None and num_chunks < 1:
            raise ConfigError(f"num_chunks must be at least 1, got {num_chunks}")
        self.tokens = tokens
        self.experts = experts
        self.ffn = ffn
        self._num_chunks = num_chunks
        self.meter = meter or Meter()

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype: the weighted sum over each token's choices."""
        sent, meter, now_s = [], self.meter, time.perf_counter
        began_s = now_s()
        for x, choices, at in self._chunks(x_TD, routing, tag):
            sent.append((at, self.tokens.send(x, choices, at, hint_E)))
            hint_E = None  # it is about the whole layer: once is enough
        meter.transfer_s += now_s() - began_s
        for at, _ in sent:
            yield self.experts.next(at)
            began_s = now_s()
            batch = self.experts.receive(at)
            meter.transfer_s += now_s() - began_s
            out_JD = yield from self.ffn(batch)
            meter.num_jobs += len(out_JD)
            began_s = now_s()
            self.experts.reply(batch, out_JD)
            meter.transfer_s += now_s() - began_s
        parts = []
        for _, ticket in sent:
            yield ticket.returned
            began_s = now_s()
            parts.append(self.tokens.collect(ticket))
            meter.transfer_s += now_s() - began_s
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self, x_TD: Tensor, routing: Routing, tag: Tag) -> Iterator[tuple[Tensor, Routing, Tag]]:
        num_chunks = self._num_chunks or self.tokens.num_chunks
        if num_chunks == 1:
            yield x_TD, routing, tag
            return
        bounds = [len(x_TD) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        for chunk in range(num_chunks):
            rows = slice(bounds[chunk], bounds[chunk + 1])
            part = Routing(experts_TK=routing.experts_TK[rows], weights_TK=routing.weights_TK[rows])
            yield x_TD[rows], part, replace(tag, chunk=chunk)
