"""Which proposer an engine has, from what it carries of speculation."""

from __future__ import annotations

from engine.speculation.config import Speculation
from engine.speculation.step_costs import StepCosts
from scheduler.draft_proposer import DraftModelProposer
from scheduler.kv_manager import KVManager
from scheduler.ngram_proposer import NgramProposer
from scheduler.policy import SchedulerConfig
from scheduler.sequence import Sequence
from scheduler.worker import NoProposer, Proposer


class Chain:
    """Asks the second about the sequences for which the first has nothing."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self._first = first
        self._second = second

    def propose(self, sequences: list[Sequence]) -> None:
        self._first.propose(sequences)
        self._second.propose([s for s in sequences if not s.draft_token_ids])


def make_proposer(
    speculation: Speculation, config: SchedulerConfig, kv: KVManager, costs: StepCosts
) -> Proposer:
    """`costs` is told by the worker what steps take."""
    depth = speculation.config.max_draft_tokens
    num_rows = max(0, config.num_logits_rows - config.max_num_seqs)
    proposers: list[Proposer] = []
    if speculation.config.looks_up_ngrams:
        proposers.append(NgramProposer(depth, num_rows, costs))
    if speculation.draft_model is not None:
        model = speculation.draft_model
        proposers.append(DraftModelProposer(model, kv, depth, num_rows, costs))
    if len(proposers) == 2:
        return Chain(*proposers)
    return proposers[0] if proposers else NoProposer()
