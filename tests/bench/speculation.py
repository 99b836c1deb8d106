"""What n-gram speculation brings and costs: copy-heavy and plain prompts, on and off by turns.

`python -m tests.bench.speculation [--rounds 5] [--threads 2] [--streams 1] [--draft BUNDLE]`

One engine in this process; in every round each prompt is answered without and with speculation,
in changing order, and the answers must be equal. A small model cannot edit code, so some answers
are replayed: every step is computed and sampled from as ever, and then the token of a given
answer is taken, as a model that can would have chosen it. Told are the ratios of wall time and of
CPU time from the first token on, medians of the rounds: the CPU's is the one to trust while the
machine does other work. The proposers live on from request to request, as in a server.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from engine.batch import Float32Array
from engine.bundle import Bundle
from engine.loader import EngineConfig, LoadedEngine, load_engine
from engine.logprobs import TokenLogprobs
from engine.sampler import Sampled, Sampler, SampleRow
from engine.sampling_params import SamplingParams
from engine.speculation.config import Speculation, SpeculationConfig
from engine.speculation.step_costs import StepCosts
from scheduler.messages import GenerationRequest
from scheduler.policy import SchedulerConfig
from scheduler.proposers import make_proposer
from scheduler.scheduler import Scheduler
from scheduler.worker import ModelWorker
from server.model_store import ModelStore

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "tests" / "data" / "night_ferry.txt").read_text("utf-8")[:1500]
CODE = (ROOT / "scheduler" / "policy.py").read_text("utf-8")[3900:6200]


@dataclass(frozen=True)
class Case:
    """`temperature` 0 is greedy. `replayed`: the answer, if it is not the model's own."""

    name: str
    prompt: str
    temperature: float = 0.0
    predicted: str = ""
    replayed: str = ""


def chat(question: str, answer: str = "") -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}"
    )


def corrected(text: str) -> str:
    """Every fifteenth word is another."""
    words = text.split(" ")
    return " ".join(word.upper() if i % 15 == 7 else word for i, word in enumerate(words))


RENAMED = CODE.replace("waited_s", "idle_s").replace("buckets", "sizes")
ASK_RENAME = chat(f"Rename waited_s to idle_s and buckets to sizes:\n\n```python\n{CODE}```")
ASK_CORRECT = chat(f"Correct this text:\n\n{TEXT}")
ASK_FACTS = chat(f"{TEXT}\n\nWhat do we learn of the office?")
FACTS = f"The text says: {TEXT[380:560]} So the office is small. It also says: {TEXT[700:900]}"

CASES = (
    Case("quote this text", f"The text:\n\n{TEXT}\n\nThe same text again:\n\n{TEXT[:80]}"),
    Case("the same at T 0.5", f"The text:\n\n{TEXT}\n\nThe same text again:\n\n{TEXT[:80]}", 0.5),
    Case("predicted output", chat("Write the text.", TEXT[:60]), predicted=TEXT),
    Case("rename in code, replayed", ASK_RENAME, replayed=RENAMED),
    Case("the same, predicted", chat("Rename."), predicted=CODE, replayed=RENAMED),
    Case("correct a text, replayed", ASK_CORRECT, replayed=corrected(TEXT)),
    Case("quotes in an answer, replayed", ASK_FACTS, replayed=FACTS),
    Case("story", chat("Tell me a story about a lighthouse keeper."), 0.8),
    Case("explain", chat("Explain how a refrigerator works."), 0.8),
    Case("facts", chat("List facts about the moon."), 1.0),
    Case("letter", chat("Write a letter to a friend about a long walk."), 1.0),
)


class ReplayingSampler:
    """Samples, and then says what it was told to say; a seed names an answer."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.answers: dict[int, list[int]] = {}

    def sample(self, logits: Float32Array, rows: list[SampleRow]) -> list[Sampled]:
        drawn = self._sampler.sample(logits, rows)
        return [self._replaced(row, each) for row, each in zip(rows, drawn, strict=True)]

    def score(self, logits: Float32Array, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        return self._sampler.score(logits, row, token_id, num_top)

    def _replaced(self, row: SampleRow, drawn: Sampled) -> Sampled:
        answer = self.answers.get(row.params.seed)
        at = row.position - row.num_prompt_tokens
        return Sampled(answer[at]) if answer is not None and at < len(answer) else drawn


class Engine:
    """One way to run requests over the loaded parts. Its proposer remembers."""

    def __init__(self, loaded: LoadedEngine, max_num_seqs: int, speculation: Speculation) -> None:
        config = SchedulerConfig(
            max_model_len=loaded.info.max_model_len,
            num_blocks=loaded.info.num_blocks,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
        )
        self.costs = StepCosts()
        self.scheduler = Scheduler(config, grammars=loaded.grammars)
        proposer = make_proposer(speculation, config, self.scheduler.kv, self.costs)
        self.sampler = ReplayingSampler(loaded.sampler)
        self.worker = ModelWorker(self.scheduler, loaded.runner, self.sampler, proposer, self.costs)

    def run(self, requests: list[GenerationRequest]) -> tuple[list[list[int]], float, float]:
        """(the answers, wall seconds, CPU seconds), from the first token of the last prompt on."""
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.worker.add(request)
        wall_s = cpu_s = 0.0
        while self.worker.has_work:
            for output in self.worker.step().outputs:
                answers[output.request_id] += output.new_token_ids
            if not wall_s and all(answers.values()):
                wall_s, cpu_s = time.perf_counter(), time.process_time()
        return (
            list(answers.values()),
            time.perf_counter() - wall_s,
            time.process_time() - cpu_s,
        )


@dataclass
class Result:
    wall_ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    plain_wall_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


def measure(case: Case, engines: tuple[Engine, Engine], args: argparse.Namespace, ids: count[int],
            tokenizer: Tokenizer) -> Result:  # fmt: skip
    plain, speculating = engines
    prompt = tuple(tokenizer.encode(case.prompt).ids)
    predicted = tuple(tokenizer.encode(case.predicted).ids)
    answer = tokenizer.encode(case.replayed).ids
    num_tokens = min(args.tokens, len(answer) or args.tokens)
    for engine in engines:
        seeds = range(10 * args.rounds + args.streams)
        engine.sampler.answers = dict.fromkeys(seeds, answer) if answer else {}
    result = Result()
    for number in range(args.rounds):
        requests = [
            GenerationRequest(
                f"r{next(ids)}", prompt,
                SamplingParams(num_tokens, temperature=case.temperature, seed=10 * number + i),
                predicted_token_ids=predicted,
            )
            for i in range(args.streams)
        ]  # fmt: skip
        totals = speculating.scheduler.totals
        before = (totals.draft_tokens, totals.accepted_tokens)
        order = (plain, speculating) if number % 2 == 0 else (speculating, plain)
        runs = {engine: engine.run(requests) for engine in order}
        (texts, wall_s, cpu_s), (same, wall_on_s, cpu_on_s) = runs[plain], runs[speculating]
        assert texts == same, f"{case.name}: speculation has changed an answer"
        result.wall_ratios.append(wall_s / wall_on_s)
        result.cpu_ratios.append(cpu_s / cpu_on_s)
        result.plain_wall_s.append(wall_s)
        result.num_tokens = sum(map(len, texts))
        result.num_drafts += totals.draft_tokens - before[0]
        result.num_accepted += totals.accepted_tokens - before[1]
    return result


def load(args: argparse.Namespace, bundle: Bundle) -> LoadedEngine:
    draft = Path(args.draft) if args.draft else None
    config = EngineConfig(
        bundle=bundle.path, device="cpu", num_threads=args.threads, kv_memory_bytes=1 << 29,
        kv_format="int8", max_model_len=2048, max_num_seqs=args.streams,
        max_num_batched_tokens=512, speculation=SpeculationConfig(draft_bundle=draft),
    )  # fmt: skip
    return load_engine(config, lambda phase: print(f"… {phase}", flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--draft", default="", help="the folder of a draft model's bundle")
    args = parser.parse_args()
    bundle = ModelStore().open(args.model)
    loaded = load(args, bundle)
    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path))
    off = Speculation(SpeculationConfig("off"))
    engines = tuple(Engine(loaded, args.streams, each) for each in (off, loaded.speculation))
    ids = count()
    print(f"{args.threads} threads, {args.streams} streams, {args.rounds} rounds;")
    print("ratios of the time without to that with speculation\n")
    print("| prompt | plain tok/s | wall × | CPU × (least … most) | drafts | stood |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        assert len(engines) == 2
        result = measure(case, engines, args, ids, tokenizer)
        speed = result.num_tokens / median(result.plain_wall_s)
        spread = f"{min(result.cpu_ratios):.2f} … {max(result.cpu_ratios):.2f}"
        stood = f"{result.num_accepted / result.num_drafts:.0%}" if result.num_drafts else "–"
        print(
            f"| {case.name} | {speed:.0f} | {median(result.wall_ratios):.2f} | "
            f"{median(result.cpu_ratios):.2f} ({spread}) | {result.num_drafts} | {stood} |",
            flush=True,
        )
    costs = engines[1].costs
    sizes = (1, 2, 4, 8, 16)
    shown = ", ".join(f"{n}: {costs.seconds(n) / costs.seconds(1):.2f}" for n in sizes)
    print(f"\nmeasured cost of a step by its rows, relative to one: {shown}")


if __name__ == "__main__":
    main()
