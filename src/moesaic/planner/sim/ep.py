"""Expert parallelism under drawn routing: how uneven experts and GPUs are, and what goes over which wire.

Counted from tokens that choose experts, with the closed form beside where there is one. Prices nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.cost.exchange import copies_once, copies_over_nodes, copies_sent, payload_share
from moesaic.errors import ConfigError
from moesaic.placement.grid import divisors_near
from moesaic.placement.pack import Slots, placed_slots
from moesaic.planner.sim.traffic import TopicTraffic, check_draws, counted, max_mean, share_variation
from moesaic.spec.experts import FloatArray, IntArray

VARIED_TOKENS = 4000  # of the batches whose expert shares are compared
MAX_SLOW = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EpCase:
    """A layer of experts over GPUs.

    Raises: ConfigError for GPUs that do not divide the experts and slots, for counts below 1, and for a study
            that would take minutes.
    """

    num_experts: int = 256
    experts_per_token: int = 8
    num_gpus: int = 32
    gpus_per_node: int = 8
    tokens_per_gpu: tuple[int, ...] = (1, 32, 128, 1024)
    num_redundant: int = 32  # further slots, over all GPUs, of the placement with copies
    num_trials: int = 20
    slow: float = 1.0  # time of a row on GPU 0, in times of one on the others: a straggler
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("experts", self.num_experts), ("top-k", self.experts_per_token), ("gpus", self.num_gpus),
            ("gpus-per-node", self.gpus_per_node), ("trials", self.num_trials),
            *(("tokens", tokens) for tokens in self.tokens_per_gpu),
        ):  # fmt: skip
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 1.0 <= self.slow <= MAX_SLOW:
            raise ConfigError(
                f"slow is a factor of 1 (as fast as the others) to {MAX_SLOW:g}, got {self.slow}"
            )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"top-k {self.experts_per_token} is more than the {self.num_experts} experts")
        if self.num_experts % self.num_gpus or self.num_redundant % self.num_gpus or self.num_redundant < 0:
            raise ConfigError(
                f"{self.num_experts} experts and {self.num_redundant} redundant slots must divide over "
                f"{self.num_gpus} GPUs; nearest legal: "
                f"{divisors_near(self.num_experts, self.num_gpus)} GPUs, and redundant slots in multiples of "
                "them"
            )
        if self.num_gpus % self.gpus_per_node and self.num_gpus > self.gpus_per_node:
            raise ConfigError(f"{self.num_gpus} GPUs are no whole number of nodes of {self.gpus_per_node}")
        check_draws(
            float(sum(self.tokens_per_gpu)) * self.num_gpus * self.num_experts * self.num_trials,
            "tokens x GPUs x experts x trials", "--tokens or --trials",
        )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be part of one."""
        return -(-self.num_gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A figure over trials."""

    mean: float
    deviation: float  # of one draw

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Mean and population standard deviation."""
        return Spread(mean=float(np.mean(values)), deviation=float(np.std(values)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How even one placement keeps the GPUs.

    Units:  busiest GPU by the mean; rows are what experts compute (the slow GPU's count for as many as it
            takes the time of), arrivals tokens received over the wire (a token with several experts on a GPU
            arrives once).
    """

    rows: Spread
    arrivals: Spread
    utilisation: float  # mean over GPUs of the part of a step in which they work; the rest they wait


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """One batch size."""

    tokens_per_gpu: int
    mean_per_expert: float
    touched: float  # distinct experts, mean over trials
    touched_even: float  # were experts equally popular and tokens independent: the most it can be
    experts: Spread  # busiest expert by the mean
    placements: Mapping[str, Placement]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """How often a token goes over a wire.

    Units:  copies per token that leave its GPU; across_nodes of them leave the node. closed: for equally
            popular experts; None where there is none.
    """

    copies: float
    closed: float
    across_nodes: float
    across_nodes_closed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EpReport:
    """What `moesaic simulate ep` answers."""

    case: EpCase
    source: str  # of the routing
    hottest_popularity: float  # of one expert by the mean
    rows: tuple[BatchRow, ...]
    copies: Mapping[str, Copies]  # each choice; once per GPU; once per node, then over the link
    payload: float  # part that buffers of every token for every other GPU would carry
    payload_most: float  # were no two experts of a token on one GPU, and none on its own
    variation: Mapping[str, float] | None  # of an expert's share between batches; None with one topic


def study_ep(case: EpCase, traffic: TopicTraffic, source: str) -> EpReport:
    """Draw batches, count. The same case gives the same figures."""
    if traffic.num_experts != case.num_experts:
        raise ConfigError(f"the routing has {traffic.num_experts} experts, the layer {case.num_experts}")
    heat_E = traffic.popularity_ZE.mean(axis=0)
    placements = {
        "contiguous": placed_slots(heat_E, case.num_gpus, 0),
        f"+{case.num_redundant} slots": placed_slots(heat_E, case.num_gpus, case.num_redundant),
    }
    if not case.num_redundant:
        placements.popitem()
    copies = _copies(case, traffic)
    return EpReport(
        case=case, source=source, hottest_popularity=max_mean(heat_E),
        rows=tuple(_row(case, traffic, placements, tokens) for tokens in case.tokens_per_gpu),
        copies=copies, payload=copies["once per GPU"].copies / max(case.num_gpus - 1, 1),
        payload_most=payload_share(case.experts_per_token, max(case.num_gpus, 2)),
        variation=_variation(case, traffic),
    )  # fmt: skip


def _variation(case: EpCase, traffic: TopicTraffic) -> dict[str, float] | None:
    """Decode, a token of each of many requests, beside prefill, as many tokens of few."""
    if len(traffic.popularity_ZE) == 1:
        return None
    rng = np.random.default_rng([case.seed, 1])
    return {
        name: share_variation(
            traffic, rng, num_requests=requests, tokens_per_request=VARIED_TOKENS // requests,
            num_chosen=case.experts_per_token, num_batches=case.num_trials,
        )
        for name, requests in (("decode", VARIED_TOKENS), ("prefill", 4))
    }  # fmt: skip


def _row(
    case: EpCase, traffic: TopicTraffic, placements: Mapping[str, Slots], tokens_per_gpu: int
) -> BatchRow:
    rng = np.random.default_rng([case.seed, tokens_per_gpu])
    num_tokens = tokens_per_gpu * case.num_gpus
    hottest: list[float] = []
    touched: list[float] = []
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in placements}
    worked: dict[str, list[float]] = {name: [] for name in placements}
    for _ in range(case.num_trials):
        topics = rng.integers(0, len(traffic.popularity_ZE), num_tokens)
        experts_TK = traffic.draw(rng, topics, case.experts_per_token)
        load_E = counted(experts_TK, case.num_experts)
        hottest.append(max_mean(load_E))
        touched.append(float(np.count_nonzero(load_E)))
        for name, slots in placements.items():
            rows_G = gpu_rows(load_E, slots, case.num_gpus)
            work_G = np.where(np.arange(case.num_gpus) == 0, case.slow * rows_G, rows_G)
            found[name][0].append(float(work_G.max() / rows_G.mean()))
            worked[name].append(float(work_G.mean() / rows_G.mean()))
            found[name][1].append(max_mean(arrivals(experts_TK, slots, case.num_gpus, rng)))
    chance = 1.0 - case.experts_per_token / case.num_experts
    return BatchRow(
        tokens_per_gpu=tokens_per_gpu,
        mean_per_expert=num_tokens * case.experts_per_token / case.num_experts,
        touched=float(np.mean(touched)), touched_even=case.num_experts * (1.0 - chance**num_tokens),
        experts=Spread.of(hottest),
        placements={
            name: Placement(
                rows=Spread.of(rows), arrivals=Spread.of(received),
                utilisation=float(np.mean(worked[name]) / np.mean(rows)),
            )
            for name, (rows, received) in found.items()
        },
    )  # fmt: skip


def gpu_rows(load_E: IntArray | FloatArray, slots: Slots, num_gpus: int) -> FloatArray:
    """Rows that each GPU computes when an expert's tokens are divided evenly over its copies, in turn.

    Shapes:  returns [num_gpus] float64, whole numbers.
    """
    order = np.argsort(slots.expert, kind="stable")
    expert, rank = slots.expert[order], slots.rank[order]
    first = np.searchsorted(expert, np.arange(len(load_E)))
    nth = np.arange(len(expert)) - first[expert]  # which copy of its expert a slot is
    copies = np.bincount(expert, minlength=len(load_E))[expert]
    whole = np.asarray(load_E, np.float64)[expert]
    rows = whole // copies + (nth < whole % copies)
    return np.bincount(rank, weights=rows, minlength=num_gpus).astype(np.float64)


def arrivals(experts_TK: IntArray, slots: Slots, num_gpus: int, rng: np.random.Generator) -> IntArray:
    """Tokens that each GPU receives from others, each once however many of its experts are there.

    Tokens live on the GPUs evenly; of several copies of an expert a token takes one at random.

    Shapes:  experts_TK [T, K]; returns [num_gpus].
    """
    target_TK = chosen_gpus(experts_TK, slots, rng)
    home_T = np.arange(len(experts_TK)) % num_gpus
    return np.asarray(_reached(target_TK, home_T, num_gpus).sum(axis=0), np.int64)


def chosen_gpus(experts_TK: IntArray, slots: Slots, rng: np.random.Generator) -> IntArray:
    """The GPU that each choice goes to.

    Shapes:  [T, K] to [T, K].
    """
    order = np.argsort(slots.expert, kind="stable")
    num_experts = int(slots.expert.max()) + 1
    first = np.searchsorted(slots.expert[order], np.arange(num_experts))
    copies = np.bincount(slots.expert, minlength=num_experts)
    nth = (rng.random(experts_TK.shape) * copies[experts_TK]).astype(np.int64)
    chosen: IntArray = slots.rank[order][first[experts_TK] + nth]
    return chosen


def _reached(target_TK: IntArray, home_T: IntArray, count: int) -> FloatArray:
    """Which places [T, count] each token is sent to, its own left out."""
    reached = np.zeros((len(target_TK), count), dtype=bool)
    reached[np.arange(len(target_TK))[:, None], target_TK] = True
    reached[np.arange(len(target_TK)), home_T] = False
    return reached


def _copies(case: EpCase, traffic: TopicTraffic) -> dict[str, Copies]:
    """Copies per token by what is sent once, contiguous placement, counted over a few thousand tokens."""
    rng = np.random.default_rng([case.seed, 0])
    num_tokens = max(4096 // case.num_gpus, 1) * case.num_gpus
    topics = rng.integers(0, len(traffic.popularity_ZE), num_tokens)
    target_TK = traffic.draw(rng, topics, case.experts_per_token) * case.num_gpus // case.num_experts
    home_T = np.arange(num_tokens) % case.num_gpus
    node_TK, own_T = target_TK // case.gpus_per_node, home_T // case.gpus_per_node
    gpus = _reached(target_TK, home_T, case.num_gpus)
    is_far = np.arange(case.num_gpus)[None, :] // case.gpus_per_node != own_T[:, None]
    nodes = _reached(node_TK, own_T, case.num_nodes)
    k, experts, gpus_all = case.experts_per_token, case.num_experts, case.num_gpus
    per_gpu = copies_once(1, k, gpus_all, experts)
    far, per_node = (
        copies_over_nodes(1, k, gpus_all, case.gpus_per_node, experts) if case.num_nodes > 1 else (0.0, 0.0)
    )
    return {
        "each choice": Copies(
            copies=float((target_TK != home_T[:, None]).sum(axis=1).mean()),
            closed=copies_sent(1, k, gpus_all),
            across_nodes=float((node_TK != own_T[:, None]).sum(axis=1).mean()),
            across_nodes_closed=copies_sent(1, k, case.num_nodes),
        ),
        "once per GPU": Copies(
            copies=float(gpus.sum(axis=1).mean()), closed=per_gpu,
            across_nodes=float((gpus & is_far).sum(axis=1).mean()), across_nodes_closed=far,
        ),
        "once per node": Copies(
            copies=float(gpus.sum(axis=1).mean()), closed=per_gpu,
            across_nodes=float(nodes.sum(axis=1).mean()), across_nodes_closed=per_node,
        ),
    }  # fmt: skip
