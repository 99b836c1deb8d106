"""One step of a decoder on the CPU, from embeddings to logits, as one compiled function.

Every thread of a team runs `run_step`. Its work alternates between rows (norms, quantizing: one
token is one thread's) and panels (matrix products: 16 outputs of all tokens are one thread's,
taken in turn from a shared counter, so that a slow core does less). No result depends on who
computed it. The order of the operations is that of `export/graph.py`; what an architecture leaves
out is `NONE` in the tables. Knows arrays only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from engine.kernels import panel_simd
from engine.kernels.attention_kernel import attend_part, make_work
from engine.kernels.page_write_kernel import write_part
from engine.kernels.panel_amx import UNPACKED_BYTES, WIDE_ROWS, configure, release
from engine.kernels.panel_matrix import BLOCK_INPUTS, PANEL_FORMS
from engine.kernels.panel_matrix import PANEL_OUTPUTS as OUTPUTS
from engine.kernels.panel_tiles import (
    Tiles,
    is_wide,
    run_tile,
    run_wide_tile,
    tile_panels,
    tile_rows,
    unpack_panels,
    wide_tile_rows,
)
from engine.kernels.simd import row_softcap
from engine.kernels.thread_team import fetch_add, ticks, wait_for_all

_compiled: Any = numba.njit(nogil=True, error_model="numpy")

# Columns of `Model.layers` and of `Model.matrices`.
(ATTN_NORM, QKV, Q_NORM, K_NORM, OUTPUT, POST_ATTN_NORM, MLP_NORM, GATE_UP, DOWN, POST_MLP_NORM,
 WINDOW, ROPE, LAYER_COLUMNS) = range(13)  # fmt: skip
ADDRESS, FORM, NUM_PANELS, NUM_BLOCKS, BIAS, MATRIX_COLUMNS = range(6)
NONE = -1

SILU, GELU_TANH = range(2)
COUNTERS_PER_LAYER = 5
_LAYER_PHASES = ("norm", "qkv", "rope and write", "attention", "quantize", "output", "norm",
                 "gate and up", "down")  # fmt: skip
NUM_LAYER_PHASES, NUM_MLP_PHASES = len(_LAYER_PHASES), 4
_LAST_PHASES = ("norm", "head", "logits")
COUNTER_WORDS = 8  # int64 words of a cache line
_STOPS = -COUNTER_WORDS  # in `Buffers.sync`
STOPPED = -1

_BLOCK_BYTES = tuple(form.block_bytes for form in PANEL_FORMS)
CHUNK_PANELS = 4
WIDE_CHUNK_PANELS = 3  # less to wait for at the end
GATED_COLUMNS = 2 * CHUNK_PANELS * OUTPUTS


def phase_names(num_layers: int) -> tuple[str, ...]:
    """What the threads do between two barriers, in order."""
    return _LAYER_PHASES * num_layers + _LAST_PHASES


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


class Rows(NamedTuple):
    """Activations in 8 bits: `levels` [T, K] int8, `scales` and `sums` [T, K / 32] float32.

    Of a product that `is_wide` they lie in tiles of 16 rows: `levels` [T / 16, K / 32, 16, 32],
    `scales` and `sums` [T / 16, K / 32, 16].
    """

    levels: Any
    scales: Any
    sums: Any


class Buffers(NamedTuple):
    """`sync` int64, zeroed before a step: the barrier, a counter per phase, then whether the step
    stops. `stop` [1] int64: who sets it makes the step stop at its next layer. `hidden` holds
    the embeddings at the start. Room for TILE_ROWS rows more than a step has, since the last tile
    of rows is not always full. `tiles`, `unpacked` (panels, for the matrix unit), `rows`,
    `attention` and `times` have a place for each thread: times[thread, 2 * i] and the one after it
    are the ticks at the beginning and the end of phase i (`phase_names`).
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


@_compiled
def prepare(
    tiles: Tiles, matrix: Any, first: int, last: int, num_rows: int, scratch: Any, at: int
) -> int:
    """Panels `first` to `last` - 1 for `multiply`: the address of their unpacked form, or 0.

    They are unpacked at byte `at` of `scratch` for the matrix unit, if there is one and enough
    rows for it. `finish` must follow.
    """
    if not is_wide(num_rows):
        return 0
    configure()
    num_blocks, form = matrix[NUM_BLOCKS], matrix[FORM]
    address = matrix[ADDRESS] + first * num_blocks * _BLOCK_BYTES[form]
    place = scratch.ctypes.data + at
    unpack_panels(tiles.unpack, form, address, last - first, num_blocks, place)
    return int(place)


@_compiled
def finish(num_rows: int) -> None:
    """The calling thread has multiplied all that it prepared."""
    if is_wide(num_rows):
        release()


@_compiled
def multiply(
    tiles: Tiles, matrix: Any, first: int, last: int, unpacked: int, x: Rows, row: int,
    num_rows: int, out: Any, out_row: int, column: int,
) -> int:  # fmt: skip
    """Some rows of `x`, from `row` on, times panels `first` to `last` - 1; how many it did.

    They go to out[out_row:, column:]. A tile that is not full also writes rows past the last one.
    `unpacked`: what `prepare` returned.
    """
    num_blocks, form, out_stride = matrix[NUM_BLOCKS], matrix[FORM], out.strides[0]
    levels, stride = x.levels[row].ctypes.data, x.levels.strides[0]
    scales, sums = x.scales[row].ctypes.data, x.sums[row].ctypes.data
    place = out[out_row].ctypes.data + 4 * column
    if unpacked != 0:
        count = wide_tile_rows(num_rows)
        run_wide_tile(
            tiles.wide, count, unpacked, last - first, num_blocks, levels, scales, sums, place,
            out_stride,
        )  # fmt: skip
        return min(count, num_rows)
    panel_bytes = num_blocks * _BLOCK_BYTES[form]
    address = matrix[ADDRESS] + first * panel_bytes
    count = tile_rows(num_rows)
    step, i = tile_panels(count), 0
    while i + step <= last - first:
        run_tile(
            tiles.narrow, form, count, step, address + i * panel_bytes, num_blocks, levels, stride,
            scales, sums, x.scales.strides[0], place + 4 * OUTPUTS * i, out_stride,
        )  # fmt: skip
        i += step
    while i < last - first:
        for r in range(min(count, num_rows)):
            skipped = r * x.scales.strides[0]
            run_tile(
                tiles.narrow, form, 1, 1, address + i * panel_bytes, num_blocks,
                levels + r * stride, stride, scales + skipped, sums + skipped,
                x.scales.strides[0], place + 4 * OUTPUTS * i + r * out_stride, out_stride,
            )  # fmt: skip
        i += 1
    return min(count, num_rows)


@_compiled
def project(
    tiles: Tiles, matrix: Any, vectors: Any, x: Rows, num_rows: int, out: Any, counter: int,
    scratch: Any,
) -> None:  # fmt: skip
    """out = x times the matrix, plus its bias; chunks of panels are taken in turn."""
    num_panels, bias = matrix[NUM_PANELS], matrix[BIAS]
    chunk = WIDE_CHUNK_PANELS if is_wide(num_rows) else CHUNK_PANELS
    while True:
        first = fetch_add(counter, 1) * chunk
        if first >= num_panels:
            return finish(num_rows)
        last = min(first + chunk, num_panels)
        unpacked = prepare(tiles, matrix, first, last, num_rows, scratch, 0)
        row = 0
        while row < num_rows:
            row += multiply(
                tiles, matrix, first, last, unpacked, x, row, num_rows - row, out, row,
                first * OUTPUTS,
            )  # fmt: skip
        if bias != NONE:
            for row in range(num_rows):
                for i in range(first * OUTPUTS, last * OUTPUTS):
                    out[row, i] += vectors[bias + i]


@_compiled
def _gate(gates: Any, ups: Any, activation: int) -> None:
    """gates = activation(gates) * ups."""
    for start in range(0, gates.shape[0], OUTPUTS):
        gate, up = gates.ctypes.data + 4 * start, ups.ctypes.data + 4 * start
        if activation == SILU:
            panel_simd.gate_silu(gate, up, gate)
        else:
            panel_simd.gate_gelu_tanh(gate, up, gate)


@_compiled
def project_gated(
    tiles: Tiles, matrix: Any, vectors: Any, activation: int, x: Rows, num_rows: int, tile: Any,
    out: Rows, counter: int, scratch: Any,
) -> None:  # fmt: skip
    """out = activation(gate) * up, quantized: a chunk of panels of each at a time."""
    half, bias = matrix[NUM_PANELS] // 2, matrix[BIAS]
    room = CHUNK_PANELS * matrix[NUM_BLOCKS] * UNPACKED_BYTES
    while True:
        first = fetch_add(counter, 1) * CHUNK_PANELS
        if first >= half:
            return finish(num_rows)
        last = min(first + CHUNK_PANELS, half)
        gates = prepare(tiles, matrix, first, last, num_rows, scratch, 0)
        ups = prepare(tiles, matrix, half + first, half + last, num_rows, scratch, room)
        size, at, row = (last - first) * OUTPUTS, first * OUTPUTS, 0
        while row < num_rows:
            num_left = num_rows - row
            multiply(tiles, matrix, first, last, gates, x, row, num_left, tile, 0, 0)
            count = multiply(
                tiles, matrix, half + first, half + last, ups, x, row, num_left, tile, 0, size
            )
            for r in range(count):
                if bias != NONE:
                    for i in range(size):
                        tile[r, i] += vectors[bias + at + i]
                        tile[r, size + i] += vectors[bias + half * OUTPUTS + at + i]
                _gate(tile[r, :size], tile[r, size : 2 * size], activation)
                for start in range(0, size, BLOCK_INPUTS):
                    block = (at + start) // BLOCK_INPUTS
                    _quantize_block(tile[r], start, out, row + r, block, num_rows)
            row += count


@_compiled
def _quantize_block(x: Any, start: int, out: Rows, row: int, block: int, num_rows: int) -> None:
    num_blocks = out.scales.shape[1]
    if is_wide(num_rows):
        index = (row // WIDE_ROWS * num_blocks + block) * WIDE_ROWS + row % WIDE_ROWS
    else:
        index = row * num_blocks + block
    panel_simd.quantize_block(
        x.ctypes.data + 4 * start, out.levels.ctypes.data + BLOCK_INPUTS * index,
        out.scales.ctypes.data + 4 * index, out.sums.ctypes.data + 4 * index,
    )  # fmt: skip


@_compiled
def quantize(x: Any, out: Rows, row: int, num_rows: int) -> None:
    """To row `row` of `num_rows`, which are multiplied together."""
    for block in range(x.shape[0] // BLOCK_INPUTS):
        _quantize_block(x, block * BLOCK_INPUTS, out, row, block, num_rows)


@_compiled
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


@_compiled
def _norm_parts(x: Any, weight: Any, epsilon: Any) -> None:
    """The norm of every stretch of the weight's size."""
    for start in range(0, x.shape[0], weight.shape[0]):
        part = x[start : start + weight.shape[0]]
        _norm(part, weight, epsilon, part)


@_compiled
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


@_compiled
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


@_compiled
def _norm_queries_and_keys(qkv: Any, layer: Any, vectors: Any, numbers: Numbers) -> None:
    q, k = layer[Q_NORM], layer[K_NORM]
    q_weight, k_weight = vectors[q : q + numbers.q_norm_size], vectors[k : k + numbers.k_norm_size]
    _norm_parts(qkv[: numbers.q_size], q_weight, numbers.epsilon)
    _norm_parts(qkv[numbers.q_size : numbers.qk_size], k_weight, numbers.epsilon)


class Thread(NamedTuple):
    """Who runs: one of `num_threads`, its row of `Buffers.times`, and `Buffers.sync`."""

    part: int
    num_threads: int
    sync: Any
    times: Any


@_compiled
def _meet(thread: Thread, met: int) -> int:
    """The end of phase `met` and, when all are there, the beginning of the next one."""
    thread.times[2 * met + 1] = ticks()
    met = wait_for_all(thread.sync.ctypes.data, thread.num_threads, met)
    thread.times[2 * met] = ticks()
    return met


@_compiled
def _counter(thread: Thread, index: int) -> int:
    """The address of a phase's counter; the barrier comes before them all."""
    return thread.sync.ctypes.data + 8 * COUNTER_WORDS * (1 + index)


@_compiled
def _attend(
    thread: Thread, model: Model, numbers: Numbers, step: Step, pages: Pages, index: int,
    buffers: Buffers,
) -> None:  # fmt: skip
    work = make_work(
        step.tiles, numbers.key_level, numbers.head_size,
        model.layers[index, WINDOW], numbers.attention_softcap, buffers.queries,
        step.query_starts, step.context_lens, step.tables, pages.keys[index],
        pages.values[index], pages.key_scales[index], pages.value_scales[index], buffers.attended,
    )  # fmt: skip
    counter = _counter(thread, COUNTERS_PER_LAYER * index + 4)
    attend_part(thread.part, thread.num_threads, work, counter, buffers.attention)


@_compiled
def _write(
    thread: Thread, model: Model, numbers: Numbers, step: Step, pages: Pages, index: int,
    buffers: Buffers,
) -> None:  # fmt: skip
    rope = model.layers[index, ROPE]
    write_part(
        thread.part, thread.num_threads, numbers.key_level, numbers.value_level,
        numbers.head_size, step.positions, step.slots, buffers.queries, buffers.attention,
        model.cos[rope], model.sin[rope], numbers.attention_scale, buffers.qkv, pages.keys[index],
        pages.values[index], pages.key_scales[index], pages.value_scales[index],
    )  # fmt: skip


@_compiled
def _run_attention(
    thread: Thread, met: int, model: Model, numbers: Numbers, step: Step, pages: Pages, index: int,
    buffers: Buffers,
) -> int:  # fmt: skip
    """Of layer `index`, for all tokens: from `hidden` and the branch before it to `attended`.

    STOPPED, and nothing done, if that was asked for.
    """
    layer, num_tokens, qkv = model.layers[index], step.positions.shape[0], buffers.qkv
    scratch = buffers.rows[thread.part]
    for t in range(thread.part, num_tokens, thread.num_threads):
        if index > 0:
            norm = model.layers[index - 1, POST_MLP_NORM]
            _add_branch(buffers.hidden[t], buffers.branch[t], model.vectors, norm, numbers)
        _enter(buffers.hidden[t], model.vectors, layer[ATTN_NORM], numbers, scratch,
               buffers.entering, t, num_tokens)  # fmt: skip
    if thread.part == 0 and buffers.stop[0] != 0:
        buffers.sync[_STOPS] = 1
    met = _meet(thread, met)
    if buffers.sync[_STOPS] != 0:  # all see the same after the barrier
        return STOPPED
    project(model.tiles, model.matrices[layer[QKV]], model.vectors, buffers.entering, num_tokens,
            qkv, _counter(thread, COUNTERS_PER_LAYER * index),
            buffers.unpacked[thread.part])  # fmt: skip
    met = _meet(thread, met)
    if layer[Q_NORM] != NONE:
        for t in range(thread.part, num_tokens, thread.num_threads):
            _norm_queries_and_keys(qkv[t], layer, model.vectors, numbers)
    _write(thread, model, numbers, step, pages, index, buffers)
    met = _meet(thread, met)
    _attend(thread, model, numbers, step, pages, index, buffers)
    return _meet(thread, met)


@_compiled
def _run_mlp(
    thread: Thread, met: int, model: Model, numbers: Numbers, index: int, hidden: Any,
    num_rows: int, buffers: Buffers,
) -> int:  # fmt: skip
    """From the quantized attention in `inner` to the branch that is still to be added."""
    layer, counter = model.layers[index], COUNTERS_PER_LAYER * index
    scratch, branch = buffers.rows[thread.part], buffers.branch
    project(model.tiles, model.matrices[layer[OUTPUT]], model.vectors, buffers.inner, num_rows,
            branch, _counter(thread, counter + 1), buffers.unpacked[thread.part])  # fmt: skip
    met = _meet(thread, met)
    for t in range(thread.part, num_rows, thread.num_threads):
        _add_branch(hidden[t], branch[t], model.vectors, layer[POST_ATTN_NORM], numbers)
        _enter(hidden[t], model.vectors, layer[MLP_NORM], numbers, scratch, buffers.entering, t,
               num_rows)  # fmt: skip
    met = _meet(thread, met)
    project_gated(model.tiles, model.matrices[layer[GATE_UP]], model.vectors, numbers.activation,
                  buffers.entering, num_rows, buffers.tiles[thread.part], buffers.inner,
                  _counter(thread, counter + 2), buffers.unpacked[thread.part])  # fmt: skip
    met = _meet(thread, met)
    project(model.tiles, model.matrices[layer[DOWN]], model.vectors, buffers.inner, num_rows,
            branch, _counter(thread, counter + 3), buffers.unpacked[thread.part])  # fmt: skip
    return _meet(thread, met)


@_compiled
def _take_rows(thread: Thread, logits_rows: Any, buffers: Buffers) -> None:
    """Those whose logits are wanted, and only they, go through what is left of the last layer."""
    for r in range(thread.part, logits_rows.shape[0], thread.num_threads):
        t = logits_rows[r]
        for i in range(buffers.hidden.shape[1]):
            buffers.row_hidden[r, i] = buffers.hidden[t, i]
        quantize(buffers.attended[t], buffers.inner, r, logits_rows.shape[0])


@_compiled
def _run_head(
    thread: Thread, met: int, model: Model, numbers: Numbers, num_rows: int, buffers: Buffers
) -> None:
    hidden, scratch = buffers.row_hidden, buffers.rows[thread.part]
    last = model.layers.shape[0] - 1
    for t in range(thread.part, num_rows, thread.num_threads):
        norm = model.layers[last, POST_MLP_NORM]
        _add_branch(hidden[t], buffers.branch[t], model.vectors, norm, numbers)
        _enter(hidden[t], model.vectors, numbers.final_norm, numbers, scratch, buffers.entering, t,
               num_rows)  # fmt: skip
    met = _meet(thread, met)
    project(model.tiles, model.matrices[numbers.head], model.vectors, buffers.entering, num_rows,
            buffers.logits, _counter(thread, COUNTERS_PER_LAYER * (last + 1)),
            buffers.unpacked[thread.part])  # fmt: skip
    met = _meet(thread, met)
    _finish_logits(thread, buffers.logits, num_rows, numbers)
    _meet(thread, met)


@_compiled
def _finish_logits(thread: Thread, logits: Any, num_rows: int, numbers: Numbers) -> None:
    """A share of the columns: softcap(scale * logits)."""
    num_vectors = logits.shape[1] // OUTPUTS
    first = thread.part * num_vectors // thread.num_threads
    last = (thread.part + 1) * num_vectors // thread.num_threads
    for r in range(num_rows):
        if numbers.logits_scale != 1:
            for i in range(first * OUTPUTS, last * OUTPUTS):
                logits[r, i] *= numbers.logits_scale
        if numbers.logits_softcap > 0:
            address = logits[r].ctypes.data + 4 * OUTPUTS * first
            row_softcap(address, last - first, numbers.logits_softcap)


@_compiled
def run_step(
    part: int, num_threads: int, model: Model, numbers: Numbers, step: Step, pages: Pages,
    buffers: Buffers,
) -> bool:  # fmt: skip
    """The share of thread `part`: logits of `step.logits_rows`, keys and values to their slots.

    False if `buffers.stop` was set in time: then the slots hold garbage, and there are no logits.
    """
    thread = Thread(part, num_threads, buffers.sync, buffers.times[part])
    met, last, num_rows = 0, model.layers.shape[0] - 1, step.logits_rows.shape[0]
    thread.times[0] = ticks()
    for index in range(last + 1):
        met = _run_attention(thread, met, model, numbers, step, pages, index, buffers)
        if met == STOPPED:
            return False
        if index == last:
            _take_rows(thread, step.logits_rows, buffers)
            met = _meet(thread, met)
            break
        for t in range(part, step.positions.shape[0], num_threads):
            quantize(buffers.attended[t], buffers.inner, t, step.positions.shape[0])
        met = _meet(thread, met)
        num_tokens = step.positions.shape[0]
        met = _run_mlp(thread, met, model, numbers, index, buffers.hidden, num_tokens, buffers)
    if num_rows > 0:
        met = _run_mlp(thread, met, model, numbers, last, buffers.row_hidden, num_rows, buffers)
        _run_head(thread, met, model, numbers, num_rows, buffers)
    return True
