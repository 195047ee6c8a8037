"""From one row of logits to one token. Every function here reads a single row, so neighbours cannot matter.

Order, as vLLM's users expect it: repetition, frequency and presence penalties, logit bias, forbidden tokens
(grammar, end tokens before min_tokens), temperature, min_p and top_k, top_p over what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moesaic.engine.grammar import BoolArray
from moesaic.engine.philox import uniforms
from moesaic.sched.request import Logprobs, Request
from moesaic.spec.experts import IntArray

Float32Array = npt.NDArray[np.float32]

_BLOCK = 256  # values per block sum; a multiple of every vector width, so that no op below has a scalar tail
# torch splits an op among threads from 32768 values on, and a share may end inside a vector, where the
# scalar tail rounds exp differently. Shorter calls are never split.
_EXP_VALUES = 16384
_NEG_INF = np.float32(-np.inf)
_LOG2_E = float(np.log2(np.e))
_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a request asks of every draw, with the arrays that do not change from token to token."""

    request: Request
    has_penalties: bool
    seen_prompt_ids: IntArray  # distinct, only when there is a repetition penalty
    bias_ids: IntArray
    bias_values: Float32Array
    end_ids: IntArray  # forbidden before min_tokens
    top_k: int | None

    @staticmethod
    def of(request: Request, vocab: int) -> Recipe:
        """Prepare a request. Its ids are in the vocabulary, except end tokens, which are moot beyond it."""
        sampling = request.sampling
        has_repetition = sampling.repetition_penalty != 1.0
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        return Recipe(
            request=request,
            has_penalties=has_repetition or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0,
            seen_prompt_ids=np.unique(np.array(request.prompt_ids if has_repetition else (), np.int64)),
            bias_ids=np.fromiter(sampling.logit_bias.keys(), np.int64, len(sampling.logit_bias)),
            bias_values=np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias)),
            end_ids=np.array(sorted(i for i in ends if 0 <= i < vocab), dtype=np.int64),
            top_k=sampling.top_k if sampling.top_k is not None and sampling.top_k < vocab else None,
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """One token, or why this request alone fails here."""

    token_id: int | None
    logprobs: Logprobs | None = None
    failure: str | None = None


class Sampler:
    """Draws tokens. Holds scratch rows only: the same input gives the same token, whatever came before."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        width = -(-vocab // _BLOCK) * _BLOCK
        self._edited_V = np.empty(vocab, dtype=np.float32)
        self._shifted = np.empty(width, dtype=np.float32)
        self._masses = np.empty(width, dtype=np.float32)
        self._ahead = np.empty(width, dtype=np.float32)
        self._mass_slices = torch.from_numpy(self._masses).split(_EXP_VALUES)

    @np.errstate(over="ignore")  # -inf is the right limit of a difference that float32 cannot hold
    def draw(
        self, logits_V: Float32Array, recipe: Recipe, history: IntArray, allowed_V: BoolArray | None = None
    ) -> Draw:
        """The token that follows `history` (prompt and generated).

        Shapes:  logits_V [V] float32 contiguous; history [S] int64; allowed_V [V] bool, the grammar's mask.
        """
        sampling = recipe.request.sampling
        token_id = int(logits_V.argmax())  # numpy promises the first of equals, and a NaN before any number
        if not np.isfinite(logits_V[token_id]):
            return Draw(None, failure=_explain(logits_V[token_id]))
        edited_V = self._edit(logits_V, recipe, history, allowed_V)
        if edited_V is not logits_V:
            token_id = int(edited_V.argmax())
            if edited_V[token_id] == _NEG_INF:
                return Draw(None, failure=_explain(_NEG_INF))
        if not sampling.is_greedy:
            token_id = self._draw_random(edited_V, edited_V[token_id], recipe, len(history))
        if sampling.logprobs is None:
            return Draw(token_id)
        return Draw(token_id, logprobs=self.logprobs(logits_V, token_id, sampling.logprobs))

    @np.errstate(over="ignore")
    def logprobs(self, logits_V: Float32Array, token_id: int, num_top: int) -> Logprobs:
        """Natural log probabilities of a raw row of finite maximum, in float32; -inf is a value.

        Shapes:  logits_V [V] float32 contiguous.
        """
        highest = logits_V.max()
        self._shift(logits_V, highest)
        log_total = np.log(self._exponentiate().sum(dtype=np.float32))
        chosen = logits_V[token_id]
        rank = 1 + np.count_nonzero(logits_V > chosen) + np.count_nonzero(logits_V[:token_id] == chosen)
        best = self._best(num_top)
        best = best[np.argsort(-self._shifted[best], kind="stable")]
        return Logprobs(
            token_id=token_id,
            logprob=float(self._shifted[token_id] - log_total),
            rank=int(rank),
            top=tuple((int(i), float(self._shifted[i] - log_total)) for i in best),
        )

    def _edit(
        self, logits_V: Float32Array, recipe: Recipe, history: IntArray, allowed_V: BoolArray | None
    ) -> Float32Array:
        """The row after penalties, bias and forbidden tokens; the row itself when nothing applies."""
        sampling = recipe.request.sampling
        generated = history[len(recipe.request.prompt_ids) :]
        is_end_early = len(generated) < sampling.min_tokens and len(recipe.end_ids) > 0
        if not (recipe.has_penalties or len(recipe.bias_ids) or is_end_early or allowed_V is not None):
            return logits_V
        row_V = self._edited_V
        row_V[:] = logits_V
        if recipe.has_penalties:
            _penalise(row_V, recipe, generated)
        row_V[recipe.bias_ids] += recipe.bias_values
        if allowed_V is not None:
            np.copyto(row_V, _NEG_INF, where=~allowed_V)
        if is_end_early:
            row_V[recipe.end_ids] = _NEG_INF
        return row_V

    def _draw_random(self, row_V: Float32Array, highest: np.float32, recipe: Recipe, position: int) -> int:
        """Draw from the filtered softmax without sorting the row.

        A token belongs to the top_p set when the mass ranked ahead of it is below top_p. So draw from all the
        mass; a draw outside the set shows that it and all that rank behind it are outside: drop them and try
        again. Given that a draw is accepted, it is distributed as in the set.
        """
        masses, ahead = self._filter(row_V, highest, recipe), self._ahead
        seed, top_p = recipe.request.seed, recipe.request.sampling.top_p
        numbers: tuple[float, ...] = ()
        allowed = 0.0
        for attempt in range(self.vocab):
            if attempt % 4 == 0:
                numbers = uniforms(seed, position, attempt // 4)
            token_id, total = _pick(masses, numbers[attempt % 4])
            if attempt == 0:
                allowed = top_p * total
            mass = masses[token_id]
            if top_p >= 1.0 or total - float(mass) < allowed:
                return token_id  # everything else together is not enough to be ahead of it
            np.multiply(masses, np.greater(masses, mass, out=ahead), out=ahead)
            equals = np.flatnonzero(masses[:token_id] == mass)
            if float(ahead.sum(dtype=np.float32)) + len(equals) * float(mass) < allowed:
                return token_id
            ahead[equals] = mass
            masses[:] = ahead
        raise AssertionError("each attempt drops a token, and the most likely one is always accepted")

    def _filter(self, row_V: Float32Array, highest: np.float32, recipe: Recipe) -> Float32Array:
        """Masses after temperature, top_k and min_p: the greatest is 1, what is left out is 0."""
        sampling = recipe.request.sampling
        self._shift(row_V, highest)
        # A temperature that float32 cannot hold would divide by zero; there it means the arg max anyway.
        masses = self._exponentiate(max(sampling.temperature, float(np.finfo(np.float32).tiny)))
        if recipe.top_k is not None:
            best = self._best(recipe.top_k)
            kept = masses[best]
            masses.fill(0.0)
            masses[best] = kept
        if sampling.min_p > 0.0:
            masses *= masses >= np.float32(sampling.min_p)
        return masses

    def _shift(self, row_V: Float32Array, highest: np.float32) -> None:
        """Scratch row minus its maximum, the padding at -inf."""
        np.subtract(row_V, highest, out=self._shifted[: self.vocab])
        self._shifted[self.vocab :] = _NEG_INF

    def _exponentiate(self, temperature: float = 1.0) -> Float32Array:
        """Masses e^(shifted / temperature), as powers of two: torch has twice the speed there."""
        np.multiply(self._shifted, np.float32(min(_LOG2_E / temperature, _MAX)), out=self._masses)
        for part in self._mass_slices:
            torch.exp2(part, out=part)
        return self._masses

    def _best(self, num: int) -> IntArray:
        """Ids of the `num` greatest values of the shifted row, ascending; of equals the lowest ids first.

        The num-th greatest block maximum bounds the num-th greatest value from below, since num values reach
        it: only the few ids that reach it are looked at.
        """
        if num == 0:
            return np.empty(0, dtype=np.int64)
        values = self._shifted[: self.vocab]
        peaks = self._shifted.reshape(-1, _BLOCK).max(axis=1)
        bound = _nth_greatest(peaks, num) if num <= len(peaks) else _NEG_INF
        ids = np.flatnonzero(values >= bound)
        if len(ids) <= num:
            return ids
        reached = values[ids]
        last = _nth_greatest(reached, num)
        above, equal = ids[reached > last], ids[reached == last]
        return np.sort(np.concatenate((above, equal[: num - len(above)])))


def _nth_greatest(values: Float32Array, num: int) -> np.float32:
    return np.partition(values, len(values) - num)[len(values) - num]


def _penalise(row_V: Float32Array, recipe: Recipe, generated: IntArray) -> None:
    """Repetition over prompt and generated tokens, then frequency and presence over the generated ones."""
    sampling = recipe.request.sampling
    ids, counts = np.unique(generated, return_counts=True)
    if sampling.repetition_penalty != 1.0:
        seen = np.union1d(recipe.seen_prompt_ids, ids)
        factor = np.float32(sampling.repetition_penalty)
        values = row_V[seen]
        row_V[seen] = np.where(values > 0, values / factor, values * factor)
    frequency, presence = np.float32(sampling.frequency_penalty), np.float32(sampling.presence_penalty)
    row_V[ids] -= frequency * counts.astype(np.float32) + presence


def _pick(masses: Float32Array, number: float) -> tuple[int, float]:
    """Inverse of the cumulative mass in id order, in two levels: first the block, then the token in it."""
    blocks = masses.reshape(-1, _BLOCK)
    # torch adds a row of a block in half numpy's time; its threads share rows, never one row's sum.
    ends = torch.from_numpy(blocks).sum(dim=1).numpy().cumsum(dtype=np.float64)
    total = float(ends[-1])
    target = number * total
    block_idx = int(ends.searchsorted(target, "right"))
    if block_idx == len(ends):  # the product was rounded up to the total
        block_idx = int(ends.searchsorted(total))
    start = float(ends[block_idx - 1]) if block_idx else 0.0
    inside = blocks[block_idx].cumsum(dtype=np.float64)
    idx = int(inside.searchsorted(target - start, "right"))
    if idx == _BLOCK:  # the block's float32 sum is a little more than the running sum in it
        idx = int(inside.searchsorted(inside[-1]))
    return block_idx * _BLOCK + idx, total


def _explain(highest: np.float32) -> str:
    if np.isnan(highest):
        return "the model's logits contain NaN at this position"
    if highest > 0:
        return "the model's logits contain +inf at this position"
    return "no token is allowed here: every logit is -inf after bias, grammar and min_tokens"
