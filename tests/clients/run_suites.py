"""Other people's client suites against a running hexlm: one table (suite, passed, failed, why).

    python -m tests.clients.run_suites --clients FOLDER [--suite NAME ...]

FOLDER holds the suites: scripts that take BASE_URL, MODEL, API_KEY and CAPS and print
"N passed, M failed". They make environments of their own, outside of this project. Every
capability is claimed, so that nothing is skipped, and the server demands a key and allows an
origin. Knows how suites are started and counted; not what they check.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.bench.server_process import RunningServer, free_port

CHAT_MODEL = "smollm2-135m-instruct"
EMBEDDING_MODEL = "all-minilm-l6-v2"
API_KEY = "local"
ORIGIN = "http://localhost:3000"
CAPABILITIES = "tools,schema,json,logprobs,n,completions,responses,reasoning,cors,auth"

_INCOMPLETE = "response.completed"
"""An answer of at most 16 tokens that the model does not end ends in `response.incomplete`, as at
OpenAI, and the SDK's helper takes that for an error."""

_CALLS_BY_ITSELF = "test_agent_loop"
"""With the tool choice "auto" it is up to the model whether it calls."""

_MAX_TOKENS = "400"
"""Of the suites that let the model write documents: it takes its time to end a text."""

_COUNT = re.compile(r"^(\d+) passed, (\d+) failed", re.MULTILINE)
_FAILURE = re.compile(r"^(?:FAIL|FAILED|E  ) .*", re.MULTILINE)
_MAX_REASONS = 6
_MAX_REASON_CHARS = 160


@dataclass(frozen=True, slots=True)
class Suite:
    """`command`: a script of the folder and its arguments. `is_embedding`: of the checks only
    those that embed are run, with the embedding model. `needs_tokenizer`: scores token ids, which
    it makes with a tokenizer of the folder's own; any small vocabulary will do. `model_judged`:
    words of failures that judge the small model's wit and not the server."""

    name: str
    command: tuple[str, ...]
    is_embedding: bool = False
    needs_tokenizer: bool = False
    model_judged: tuple[str, ...] = ()


SUITES = (
    Suite("wire", ("wire.py",)),
    Suite("openai-python", ("py.sh", "openai", "openai_py.py"), model_judged=(_INCOMPLETE,)),
    Suite("openai-node", ("node.sh", "openai_node.mjs"), model_judged=(_INCOMPLETE,)),
    Suite("vercel-ai", ("node.sh", "vercel_ai.mjs")),
    Suite("langchain", ("langchain_std.sh",), model_judged=(_CALLS_BY_ITSELF,)),
    Suite("litellm", ("py.sh", "litellm", "litellm_client.py")),
    Suite("instructor", ("py.sh", "instructor", "instructor_client.py")),
    Suite("pydantic-ai", ("py.sh", "pydanticai", "pydantic_ai_client.py")),
    Suite("llama-index", ("py.sh", "llamaindex", "llamaindex_client.py")),
    Suite("dify", ("py.sh", "dify", "dify_client.py")),
    Suite("lm-eval", ("lmeval.sh",), needs_tokenizer=True),
    Suite("openai-python: embeddings", ("py.sh", "openai", "openai_py.py"), True),
    Suite("openai-node: embeddings", ("node.sh", "openai_node.mjs"), True),
    Suite("vercel-ai: embeddings", ("node.sh", "vercel_ai.mjs"), True),
    Suite("litellm: embeddings", ("py.sh", "litellm", "litellm_client.py"), True),
    Suite("dify: embeddings", ("py.sh", "dify", "dify_client.py"), True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`model_judged`: how many failures are the model's and not among `failed`. `reasons`: the
    lines that tell of failures; of a suite that ended without a count, its last words."""

    suite: str
    passed: int
    failed: int
    reasons: tuple[str, ...] = ()
    model_judged: int = 0


def read_outcome(suite: Suite, output: str, exit_code: int) -> Outcome:
    """What a suite printed, counted. A suite that did not count failed once."""
    counts = _COUNT.findall(output)
    if not counts:
        last_words = tuple(output.strip().splitlines()[-2:])
        return Outcome(suite.name, 0, 1, (f"no count, exit code {exit_code}", *last_words))
    passed, failed = (int(number) for number in counts[-1])
    reasons = tuple(dict.fromkeys(line.strip() for line in _FAILURE.findall(output)))
    if exit_code and not failed:
        return Outcome(suite.name, passed, 1, (f"exit code {exit_code}", *reasons))
    lines = [line for line in reasons if line.startswith("FAIL")]
    model_judged = sum(any(words in line for words in suite.model_judged) for line in lines)
    return Outcome(suite.name, passed, failed - model_judged, reasons, model_judged)


@contextmanager
def running_server(folder: Path, models: Sequence[str]) -> Iterator[RunningServer]:
    config = folder / "server.toml"
    listed = ", ".join(f'"{name}"' for name in models)
    config.write_text(
        f'[server]\napi_keys = ["{API_KEY}"]\ncors_origins = ["{ORIGIN}"]\n'
        f'[models]\nmodel = [{listed}]\n[engine]\nkv_memory = "256MiB"\n'
    )
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "serve", "--config", str(config)]
    server = RunningServer("hexlm", [*command, "--port", str(port)], port, folder / "hexlm.log")
    try:
        yield server
    finally:
        server.stop()


def run_suite(suite: Suite, clients: Path, base_url: str, logs: Path, limit_s: float) -> Outcome:
    log = logs / f"{suite.name.replace(': ', '-')}.log"
    environment = os.environ | _environment(suite, base_url)
    with log.open("wb") as out:
        if suite.needs_tokenizer:
            environment["TOKENIZER"] = str(logs / "tokenizer")
            make = ("py.sh", "lmeval", "make_tokenizer.py", environment["TOKENIZER"])
            subprocess.run(_command(clients, make), stdout=out, stderr=out, check=False)
        process = subprocess.Popen(
            _command(clients, suite.command),
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = -1
        finally:
            _end_session(process)
    return read_outcome(suite, log.read_text("utf-8", "replace"), exit_code)


def _command(clients: Path, words: Sequence[str]) -> list[str]:
    script = clients / words[0]
    return [sys.executable if script.suffix == ".py" else "bash", str(script), *words[1:]]


def _environment(suite: Suite, base_url: str) -> dict[str, str]:
    chosen = {"BASE_URL": base_url, "API_KEY": API_KEY, "AUTH": "1", "MAX_TOKENS": _MAX_TOKENS}
    if suite.is_embedding:
        return chosen | {"MODEL": EMBEDDING_MODEL, "CAPS": "embeddings", "ONLY": "^embed"}
    return chosen | {"MODEL": CHAT_MODEL, "CAPS": CAPABILITIES}


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The suite's script and whatever it started and left behind."""
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    else:
        process.kill()
    process.wait()


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    columns = ("suite", "passed", "failed", "model's wit", "why")
    table = Table(*columns, title=f"client suites against {CHAT_MODEL}")
    for outcome in outcomes:
        reasons = [escape(text[:_MAX_REASON_CHARS]) for text in outcome.reasons[:_MAX_REASONS]]
        if len(outcome.reasons) > _MAX_REASONS:
            reasons.append(f"… and {len(outcome.reasons) - _MAX_REASONS} more lines in its log")
        table.add_row(outcome.suite, *map(str, _counts(outcome)), "\n".join(reasons))
    total = [sum(counts) for counts in zip(*map(_counts, outcomes), strict=True)]
    table.add_section()
    table.add_row("all", *map(str, total), "")
    console.print(table)


def _counts(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.passed, outcome.failed, outcome.model_judged


def chosen_suites(names: Sequence[str]) -> list[Suite]:
    """Raises SystemExit with the known names for an unknown one."""
    known = {suite.name: suite for suite in SUITES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no suite {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(SUITES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run client suites against hexlm.")
    parser.add_argument("--clients", type=Path, required=True, help="the folder of the suites")
    parser.add_argument("--suite", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one suite")
    parser.add_argument("--logs", type=Path, help="where the suites' output goes")
    options = parser.parse_args()
    suites = chosen_suites(options.suite)
    if not (options.clients / "wire.py").is_file():
        raise SystemExit(
            f"the client suites are not in {options.clients}: they are no part of this "
            "repository; name their folder with CLIENTS=<folder>"
        )
    console = Console(width=150)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="hexlm-clients-"))
    logs.mkdir(parents=True, exist_ok=True)
    models = [CHAT_MODEL] + [EMBEDDING_MODEL] * any(suite.is_embedding for suite in suites)
    outcomes = []
    with running_server(logs, models) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        for suite in suites:
            outcome = run_suite(suite, options.clients.resolve(), base_url, logs, options.limit)
            outcomes.append(outcome)
            console.print(f"{outcome.suite}: {outcome.passed} passed, {outcome.failed} failed")
    show(outcomes, console)
    console.print(f"logs: {logs}")
    sys.exit(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    main()
