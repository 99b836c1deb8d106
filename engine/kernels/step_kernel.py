"""One step of a decoder on the CPU, from embeddings to logits, as one compiled function.

Every thread of a team runs `run_step`. Its work alternates between rows (norms, quantizing: some
tokens are one thread's) and panels (matrix products: some outputs of all tokens are one thread's).
A phase is over when all its items are done, by whomever: a thread that comes late, or never, is not
waited for. No result depends on who computed it. The order of the operations is that of
`export/graph.py`; what an architecture leaves out is `NONE` in the tables. Knows arrays only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.kernels import panel_simd
from engine.kernels.attention_kernel import attend_part, make_work
from engine.kernels.compiled import compiled
from engine.kernels.page_write_kernel import write_tokens
from engine.kernels.panel_matrix import PANEL_OUTPUTS as OUTPUTS
from engine.kernels.panel_product import (
    NONE,
    Rows,
    gated_chunks,
    product_chunks,
    project,
    project_gated,
    quantize,
)
from engine.kernels.panel_tiles import Tiles
from engine.kernels.simd import row_softcap
from engine.kernels.thread_team import (
    COUNTER_BYTES,
    Turns,
    fetch_add,
    next_item,
    num_chunks,
    ticks,
    wait_for,
)

# Columns of `Model.layers`.
(ATTN_NORM, QKV, Q_NORM, K_NORM, OUTPUT, POST_ATTN_NORM, MLP_NORM, GATE_UP, DOWN, POST_MLP_NORM,
 WINDOW, ROPE, LAYER_COLUMNS) = range(13)  # fmt: skip

_LAYER_PHASES = ("norm", "qkv", "rope and write", "attention", "quantize", "output", "norm",
                 "gate and up", "down")  # fmt: skip
NUM_LAYER_PHASES = len(_LAYER_PHASES)
_LAST_PHASES = ("norm", "head", "logits")
COUNTER_WORDS = COUNTER_BYTES // 8
_DONE, _STOPS, _TURNS = 0, COUNTER_WORDS, 2 * COUNTER_WORDS  # in `Buffers.sync`
STOPPED, _NO_BRANCH = -1, -2

CHUNK_ROWS = 4
_CHUNK_VECTORS = 256


def phase_names(num_layers: int) -> tuple[str, ...]:
    """What the threads do between two meetings, in order."""
    return _LAYER_PHASES * num_layers + _LAST_PHASES


def sync_words(num_layers: int, num_threads: int) -> int:
    """The size of `Buffers.sync`."""
    return _TURNS + len(phase_names(num_layers)) * num_threads * COUNTER_WORDS


class Model(NamedTuple):
    """The weights. `layers` [L, LAYER_COLUMNS] int64: offsets into `vectors` and numbers of rows
    of `matrices`, NONE for what the layer does not have. `matrices` [N, MATRIX_COLUMNS] int64:
    address of the panels, number of the form, of panels, of blocks; offset of the bias.
    `vectors` [n] float32: all norms and biases. `cos`, `sin`: a table [positions, pairs] per rope.
    `tiles`: see `panel_tiles.py`.
    """

    tiles: Tiles
    layers: Any
    matrices: Any
    vectors: Any
    cos: Any
    sin: Any


class Numbers(NamedTuple):
    """`q_norm_size`, `k_norm_size`: elements that are normed together. `final_norm`: an offset
    into the vectors, `head`: a row of the matrices. Scales and epsilons float32."""

    activation: int
    head_size: int
    q_size: int
    qk_size: int
    q_norm_size: int
    k_norm_size: int
    final_norm: int
    head: int
    key_level: int
    value_level: int
    epsilon: Any
    residual_scale: Any
    logits_scale: Any
    logits_softcap: Any
    attention_scale: Any
    attention_softcap: Any


class Buffers(NamedTuple):
    """`sync` int64, zeroed before a step: how many items are done, whether the step stops, then
    the turns of every phase. `stop` [1] int64: who sets it makes the step stop at its next layer.
    `hidden` holds the embeddings at the start. Room for TILE_ROWS rows more than a step has, since
    the last tile of rows is not always full. `tiles`, `unpacked` (panels, for the matrix unit),
    `rows`, `attention`, `waits` and `times` have a place for each thread. waits[thread]: ticks that
    it waited for others, and of its whole step; times[thread, 2 * i] and the one after it: at the
    beginning and the end of phase i (`phase_names`).
    """

    sync: Any
    stop: Any
    hidden: Any
    row_hidden: Any
    qkv: Any
    attended: Any
    branch: Any
    entering: Rows
    inner: Rows
    logits: Any
    tiles: Any
    unpacked: Any
    rows: Any
    queries: Any
    attention: Any
    waits: Any
    times: Any


class Step(NamedTuple):
    """The arrays of `batch.Batch`, and the tiles of attention (`attention_tiles.py`)."""

    positions: Any
    slots: Any
    query_starts: Any
    context_lens: Any
    tables: Any
    logits_rows: Any
    tiles: Any


class Pages(NamedTuple):
    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


@compiled
def _norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """RMS norm (Zhang and Sennrich 2019)."""
    size = x.shape[0]
    whole = size - size % OUTPUTS
    total = panel_simd.sum_of_squares(x.ctypes.data, whole)
    for i in range(whole, size):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@compiled
def _norm_parts(x: Any, weight: Any, epsilon: Any) -> None:
    """The norm of every stretch of the weight's size."""
    for start in range(0, x.shape[0], weight.shape[0]):
        part = x[start : start + weight.shape[0]]
        _norm(part, weight, epsilon, part)


@compiled
def _add_branch(hidden: Any, branch: Any, vectors: Any, norm: int, numbers: Numbers) -> None:
    """hidden += scale * norm(branch)."""
    size = hidden.shape[0]
    if norm != NONE:
        _norm(branch, vectors[norm : norm + size], numbers.epsilon, branch)
    if numbers.residual_scale != 1:
        for i in range(size):
            branch[i] *= numbers.residual_scale
    for i in range(size):
        hidden[i] += branch[i]


@compiled
def _enter(
    hidden: Any,
    vectors: Any,
    norm: int,
    numbers: Numbers,
    scratch: Any,
    out: Rows,
    row: int,
    num_rows: int,
) -> None:
    """The norm of `hidden`, quantized; `hidden` itself where there is no norm."""
    if norm == NONE:
        quantize(hidden, out, row, num_rows)
    else:
        _norm(hidden, vectors[norm : norm + hidden.shape[0]], numbers.epsilon, scratch)
        quantize(scratch, out, row, num_rows)


@compiled
def _norm_queries_and_keys(qkv: Any, layer: Any, vectors: Any, numbers: Numbers) -> None:
    q, k = layer[Q_NORM], layer[K_NORM]
    q_weight, k_weight = vectors[q : q + numbers.q_norm_size], vectors[k : k + numbers.k_norm_size]
    _norm_parts(qkv[: numbers.q_size], q_weight, numbers.epsilon)
    _norm_parts(qkv[numbers.q_size : numbers.qk_size], k_weight, numbers.epsilon)


class Thread(NamedTuple):
    """Who runs: one of `num_threads`, its rows of `Buffers.waits` and `times`, and `sync`."""

    part: int
    num_threads: int
    sync: Any
    waits: Any
    times: Any


class Moment(NamedTuple):
    """Where in a step a thread is: in phase `phase`, before which `num_items` had to be done."""

    phase: int
    num_items: int


@compiled
def _turns(thread: Thread, moment: Moment) -> Turns:
    """At the items of this phase."""
    first = _TURNS + moment.phase * thread.num_threads * COUNTER_WORDS
    return Turns(thread.part, thread.num_threads, thread.sync[first:].ctypes.data)


@compiled
def _meet(thread: Thread, moment: Moment, num_done: int, num_items: int) -> Moment:
    """This thread has done `num_done` of the phase's items and found no more; the beginning of the
    next phase, when all `num_items` are done."""
    came = ticks()
    done, wanted = thread.sync.ctypes.data + 8 * _DONE, moment.num_items + num_items
    if num_done > 0:
        fetch_add(done, num_done)
    wait_for(done, wanted)
    goes = ticks()
    thread.times[2 * moment.phase + 1], thread.times[2 * moment.phase + 2] = came, goes
    thread.waits[0] += goes - came
    thread.waits[1] = goes - thread.times[0]
    return Moment(moment.phase + 1, wanted)


@compiled
def _attend(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, step: Step, pages: Pages,
    index: int, buffers: Buffers,
) -> Moment:  # fmt: skip
    work = make_work(
        step.tiles, numbers.key_level, numbers.head_size,
        model.layers[index, WINDOW], numbers.attention_softcap, buffers.queries,
        step.query_starts, step.context_lens, step.tables, pages.keys[index],
        pages.values[index], pages.key_scales[index], pages.value_scales[index], buffers.attended,
    )  # fmt: skip
    num_done, num_items = attend_part(_turns(thread, moment), work, buffers.attention)
    return _meet(thread, moment, num_done, num_items)


@compiled
def _write(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, step: Step, pages: Pages,
    index: int, buffers: Buffers,
) -> Moment:  # fmt: skip
    rope, layer = model.layers[index, ROPE], model.layers[index]
    num_tokens, num_done = step.positions.shape[0], 0
    num_items, turns = num_chunks(num_tokens, CHUNK_ROWS), _turns(thread, moment)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        first = item.number * CHUNK_ROWS
        last = min(first + CHUNK_ROWS, num_tokens)
        if layer[Q_NORM] != NONE:
            for t in range(first, last):
                _norm_queries_and_keys(buffers.qkv[t], layer, model.vectors, numbers)
        write_tokens(
            first, last, thread.part, numbers.key_level, numbers.value_level,
            numbers.head_size, step.positions, step.slots, buffers.queries, buffers.attention,
            model.cos[rope], model.sin[rope], numbers.attention_scale, buffers.qkv,
            pages.keys[index], pages.values[index], pages.key_scales[index],
            pages.value_scales[index],
        )  # fmt: skip
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    return _meet(thread, moment, num_done, num_items)


@compiled
def _add_and_enter(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, branch_norm: int, norm: int,
    hidden: Any, num_rows: int, buffers: Buffers,
) -> Moment:  # fmt: skip
    """Adds the branch to `hidden`, and its norm is what is multiplied next.

    Who does the first rows also asks whether the step is to stop, so that all threads see the same
    afterwards.
    """
    scratch, num_done, turns = buffers.rows[thread.part], 0, _turns(thread, moment)
    num_items = num_chunks(num_rows, CHUNK_ROWS)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        if item.number == 0 and buffers.stop[0] != 0:
            thread.sync[_STOPS] = 1
        first = item.number * CHUNK_ROWS
        for t in range(first, min(first + CHUNK_ROWS, num_rows)):
            if branch_norm != _NO_BRANCH:
                _add_branch(hidden[t], buffers.branch[t], model.vectors, branch_norm, numbers)
            _enter(hidden[t], model.vectors, norm, numbers, scratch, buffers.entering, t, num_rows)
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    return _meet(thread, moment, num_done, num_items)


@compiled
def _project(
    thread: Thread, moment: Moment, model: Model, number: int, x: Rows, num_rows: int, out: Any,
    unpacked: Any,
) -> Moment:  # fmt: skip
    """`number`: the matrix."""
    matrix = model.matrices[number]
    num_done = project(
        model.tiles, matrix, model.vectors, x, num_rows, out, _turns(thread, moment),
        unpacked[thread.part],
    )  # fmt: skip
    return _meet(thread, moment, num_done, product_chunks(matrix, num_rows))


@compiled
def _round_attended(thread: Thread, moment: Moment, num_tokens: int, buffers: Buffers) -> Moment:
    num_items, num_done, turns = num_chunks(num_tokens, CHUNK_ROWS), 0, _turns(thread, moment)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        first = item.number * CHUNK_ROWS
        for t in range(first, min(first + CHUNK_ROWS, num_tokens)):
            quantize(buffers.attended[t], buffers.inner, t, num_tokens)
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    return _meet(thread, moment, num_done, num_items)


@compiled
def _take_rows(thread: Thread, moment: Moment, logits_rows: Any, buffers: Buffers) -> Moment:
    """Those whose logits are wanted, and only they, go through what is left of the last layer."""
    num_rows, num_done, turns = logits_rows.shape[0], 0, _turns(thread, moment)
    item = next_item(turns, 0, num_rows)
    while item.number >= 0:
        r, t = item.number, logits_rows[item.number]
        for i in range(buffers.hidden.shape[1]):
            buffers.row_hidden[r, i] = buffers.hidden[t, i]
        quantize(buffers.attended[t], buffers.inner, r, num_rows)
        num_done += 1
        item = next_item(turns, item.stretch, num_rows)
    return _meet(thread, moment, num_done, num_rows)


@compiled
def _run_attention(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, step: Step, pages: Pages,
    index: int, buffers: Buffers,
) -> Moment:  # fmt: skip
    """Of layer `index`, for all tokens: from `hidden` and the branch before it to `attended`.

    Nothing is done, and the phase is STOPPED, if that was asked for.
    """
    layer, num_tokens = model.layers[index], step.positions.shape[0]
    branch_norm = model.layers[index - 1, POST_MLP_NORM] if index > 0 else _NO_BRANCH
    moment = _add_and_enter(thread, moment, model, numbers, branch_norm, layer[ATTN_NORM],
                            buffers.hidden, num_tokens, buffers)  # fmt: skip
    if thread.sync[_STOPS] != 0:
        return Moment(STOPPED, 0)
    moment = _project(thread, moment, model, layer[QKV], buffers.entering, num_tokens, buffers.qkv,
                      buffers.unpacked)  # fmt: skip
    moment = _write(thread, moment, model, numbers, step, pages, index, buffers)
    return _attend(thread, moment, model, numbers, step, pages, index, buffers)


@compiled
def _run_mlp(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, index: int, hidden: Any,
    num_rows: int, buffers: Buffers,
) -> Moment:  # fmt: skip
    """From the quantized attention in `inner` to the branch that is still to be added."""
    layer, part = model.layers[index], thread.part
    moment = _project(thread, moment, model, layer[OUTPUT], buffers.inner, num_rows,
                      buffers.branch, buffers.unpacked)  # fmt: skip
    moment = _add_and_enter(thread, moment, model, numbers, layer[POST_ATTN_NORM], layer[MLP_NORM],
                            hidden, num_rows, buffers)  # fmt: skip
    matrix = model.matrices[layer[GATE_UP]]
    num_done = project_gated(
        model.tiles, matrix, model.vectors, numbers.activation, buffers.entering, num_rows,
        buffers.tiles[part], buffers.inner, _turns(thread, moment), buffers.unpacked[part],
    )  # fmt: skip
    moment = _meet(thread, moment, num_done, gated_chunks(matrix))
    return _project(thread, moment, model, layer[DOWN], buffers.inner, num_rows, buffers.branch,
                    buffers.unpacked)  # fmt: skip


@compiled
def _run_head(
    thread: Thread, moment: Moment, model: Model, numbers: Numbers, num_rows: int, buffers: Buffers
) -> None:
    branch_norm = model.layers[model.layers.shape[0] - 1, POST_MLP_NORM]
    moment = _add_and_enter(thread, moment, model, numbers, branch_norm, numbers.final_norm,
                            buffers.row_hidden, num_rows, buffers)  # fmt: skip
    moment = _project(thread, moment, model, numbers.head, buffers.entering, num_rows,
                      buffers.logits, buffers.unpacked)  # fmt: skip
    _finish_logits(thread, moment, buffers.logits, num_rows, numbers)


@compiled
def _finish_logits(
    thread: Thread, moment: Moment, logits: Any, num_rows: int, numbers: Numbers
) -> None:
    """softcap(scale * logits), some columns at a time."""
    num_vectors, num_items, num_done = logits.shape[1] // OUTPUTS, 0, 0
    if numbers.logits_scale != 1 or numbers.logits_softcap > 0:
        num_items = num_chunks(num_vectors, _CHUNK_VECTORS)
    turns = _turns(thread, moment)
    item = next_item(turns, 0, num_items)
    while item.number >= 0:
        first = item.number * _CHUNK_VECTORS
        last = min(first + _CHUNK_VECTORS, num_vectors)
        for r in range(num_rows):
            if numbers.logits_scale != 1:
                for i in range(first * OUTPUTS, last * OUTPUTS):
                    logits[r, i] *= numbers.logits_scale
            if numbers.logits_softcap > 0:
                address = logits[r].ctypes.data + 4 * OUTPUTS * first
                row_softcap(address, last - first, numbers.logits_softcap)
        num_done += 1
        item = next_item(turns, item.stretch, num_items)
    _meet(thread, moment, num_done, num_items)


@compiled
def run_step(
    part: int, num_threads: int, model: Model, numbers: Numbers, step: Step, pages: Pages,
    buffers: Buffers,
) -> bool:  # fmt: skip
    """The share of thread `part`: logits of `step.logits_rows`, keys and values to their slots.

    All is done when one thread returns; `buffers` must stay until all have returned that began.
    False if `buffers.stop` was set in time: then the slots hold garbage, and there are no logits.
    """
    thread = Thread(part, num_threads, buffers.sync, buffers.waits[part], buffers.times[part])
    moment, last, num_rows = Moment(0, 0), model.layers.shape[0] - 1, step.logits_rows.shape[0]
    num_tokens = step.positions.shape[0]
    thread.waits[0] = 0
    thread.times[0] = ticks()
    for index in range(last + 1):
        moment = _run_attention(thread, moment, model, numbers, step, pages, index, buffers)
        if moment.phase == STOPPED:
            return False
        if index == last:
            moment = _take_rows(thread, moment, step.logits_rows, buffers)
            break
        moment = _round_attended(thread, moment, num_tokens, buffers)
        moment = _run_mlp(
            thread, moment, model, numbers, index, buffers.hidden, num_tokens, buffers
        )
    if num_rows > 0:
        moment = _run_mlp(
            thread, moment, model, numbers, last, buffers.row_hidden, num_rows, buffers
        )
        _run_head(thread, moment, model, numbers, num_rows, buffers)
    return True
