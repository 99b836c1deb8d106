"""Token buckets: how a step of T rows is cut into calls of graphs with a fixed number of rows.

A pure decision over numbers. Knows nothing of graphs, devices or what a row is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CALL_COST_ROWS = 32
"""What a call costs apart from its rows, in rows; used where nobody has measured.

A call streams all weights once, whatever its bucket. With 4-bit weights a weight is half a byte
and two operations a row; at 152 GB/s (X2 Elite's memory) and 20 TFLOP/s in fp16 (assumed: what
matrix units of this class reach) the weights arrive in the time of 33 rows. The call itself costs
0.19 ms more (docs/npu.md). A measured table replaces this.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start:start + num_rows of a step, run in the graph for `bucket` >= num_rows rows."""

    start: int
    num_rows: int
    bucket: int

    @property
    def num_padding_rows(self) -> int:
        return self.bucket - self.num_rows


def default_costs(buckets: Sequence[int]) -> dict[int, float]:
    """Bucket → cost of one call, in rows."""
    return {bucket: float(CALL_COST_ROWS + bucket) for bucket in buckets}


class BucketPlan:
    """The cheapest pieces for every number of rows.

    `costs` maps each bucket to the time of one call, in any unit. The choice is exact: of all
    multisets of buckets with room for the rows, one of least total cost; of equally cheap ones
    that with the least room, then with the fewest calls, then with the larger buckets.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        """Raises ValueError unless there are buckets and all numbers are positive."""
        if not costs or any(bucket < 1 for bucket in costs):
            raise ValueError(f"token buckets must be positive numbers, not {sorted(costs)}")
        if not all(0 < cost < float("inf") for cost in costs.values()):
            raise ValueError(f"costs of token buckets must be positive, not {dict(costs)}")
        self._costs = dict(sorted(costs.items(), reverse=True))
        # Row count → (cost, room, number of calls, first bucket) of the best choice for it.
        self._best: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self._costs))

    def cost(self, num_rows: int) -> float:
        self._extend(num_rows)
        return self._best[num_rows][0]

    def pieces(self, num_rows: int) -> tuple[Piece, ...]:
        """The rows 0:num_rows in order, larger buckets first; only the last piece has padding."""
        self._extend(num_rows)
        chosen = []
        rest = num_rows
        while rest > 0:
            chosen.append(self._best[rest][3])
            rest -= chosen[-1]
        pieces = []
        start = 0
        for bucket in sorted(chosen, reverse=True):
            pieces.append(Piece(start, min(bucket, num_rows - start), bucket))
            start += bucket
        return tuple(pieces)

    def room_for(self, num_rows: int) -> int:
        """Rows that the pieces have, padding included."""
        self._extend(num_rows)
        return self._best[num_rows][1]

    def room(self, max_rows: int) -> int:
        """Rows that are enough for every step of up to `max_rows` rows."""
        return max(self.room_for(num_rows) for num_rows in range(max_rows + 1))

    def largest_pieces(self, max_rows: int) -> tuple[Piece, ...]:
        """For each place where a piece of a step of up to `max_rows` rows begins, the largest."""
        largest: dict[int, int] = {}
        for num_rows in range(max_rows + 1):
            for piece in self.pieces(num_rows):
                largest[piece.start] = max(piece.bucket, largest.get(piece.start, 0))
        return tuple(Piece(start, bucket, bucket) for start, bucket in sorted(largest.items()))

    def _extend(self, num_rows: int) -> None:
        for rows in range(len(self._best), num_rows + 1):
            self._best.append(min(self._choices(rows), key=_rank))

    def _choices(self, rows: int) -> list[tuple[float, int, int, int]]:
        choices = []
        for bucket, cost in self._costs.items():
            rest_cost, rest_room, rest_calls, _ = self._best[max(0, rows - bucket)]
            choices.append((cost + rest_cost, bucket + rest_room, 1 + rest_calls, bucket))
        return choices


def _rank(choice: tuple[float, int, int, int]) -> tuple[float, int, int, int]:
    cost, room, num_calls, bucket = choice
    return cost, room, num_calls, -bucket
