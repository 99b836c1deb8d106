from engine.batch import Batch
from scheduler.batch_builder import BatchBuilder
from scheduler.plan import Plan
from scheduler.sequence import Sequence
from tests.fakes import make_config, make_request

CONFIG = make_config()


def make_sequence(prompt: list[int], num_computed: int, table: list[int]) -> Sequence:
    sequence = Sequence(make_request("r", prompt), 0, 0.0, CONFIG.max_model_len)
    sequence.num_computed_tokens = num_computed
    sequence.block_table = table
    return sequence


def make_plan(*entries: tuple[Sequence, int, int, int]) -> Plan:
    sequences, num_tokens, num_prompt_rows, num_sample_rows = map(list, zip(*entries, strict=True))
    return Plan(sequences, num_tokens, num_prompt_rows, num_sample_rows)


def as_lists(batch: Batch) -> dict[str, list[int]]:
    return {name: getattr(batch, name).tolist() for name in Batch.__slots__[:-2]} | {
        "logits_rows": batch.logits_rows.tolist()
    }


def test_a_decode_and_a_chunk_are_packed_one_after_the_other() -> None:
    decode = make_sequence([10, 11, 12, 13, 14, 15], 5, [7, 2])
    chunk = make_sequence([20, 21, 22, 23, 24, 25, 26, 27], 3, [5, 1])
    batch = BatchBuilder(CONFIG).build(make_plan((decode, 1, 0, 1), (chunk, 4, 0, 0)))
    assert as_lists(batch) == {
        "token_ids": [15, 23, 24, 25, 26],
        "positions": [5, 3, 4, 5, 6],
        "slot_mapping": [2 * 4 + 1, 5 * 4 + 3, 4, 5, 6],
        "query_starts": [0, 1, 5],
        "context_lens": [6, 7],
        "logits_rows": [0],
    }
    assert batch.block_tables[:, :2].tolist() == [[7, 2], [5, 1]]


def test_drafts_follow_the_tokens_and_have_a_row_each() -> None:
    sequence = make_sequence([10, 11, 12], 2, [3, 4])
    sequence.draft_token_ids = [50, 51]
    batch = BatchBuilder(CONFIG).build(make_plan((sequence, 3, 0, 3)))
    assert batch.token_ids.tolist() == [12, 50, 51]
    assert batch.slot_mapping.tolist() == [14, 15, 16]
    assert batch.logits_rows.tolist() == [0, 1, 2]


def test_prompt_rows_are_the_chunks_first_and_sample_rows_its_last() -> None:
    first = make_sequence([1, 2, 3, 4], 0, [0])
    second = make_sequence([1, 2, 3, 4], 0, [1])
    batch = BatchBuilder(CONFIG).build(make_plan((first, 2, 2, 0), (second, 4, 3, 1)))
    assert batch.logits_rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_all_arrays_are_contiguous_int32_views_of_reused_buffers() -> None:
    builder, sequence = BatchBuilder(CONFIG), make_sequence([1, 2, 3], 0, [6])
    first = builder.build(make_plan((sequence, 3, 0, 1)))
    second = builder.build(make_plan((sequence, 3, 0, 1)))
    for name in Batch.__slots__:
        array = getattr(second, name)
        assert array.dtype == "int32" and array.flags.c_contiguous
        assert array.base is not None and array.base is getattr(first, name).base
    assert second.block_tables.shape == (1, 16)


def test_rows_follow_tables_that_grow_are_replaced_or_change_places() -> None:
    builder = BatchBuilder(CONFIG)
    a, b = make_sequence([1, 2, 3], 2, [3]), make_sequence([4, 5, 6], 2, [4])
    builder.build(make_plan((a, 1, 0, 1), (b, 1, 0, 1)))
    a.block_table.append(9)
    grown = builder.build(make_plan((a, 1, 0, 1), (b, 1, 0, 1)))
    assert grown.block_tables[0, :2].tolist() == [3, 9]
    a.block_table = [8]
    swapped = builder.build(make_plan((b, 1, 0, 1), (a, 1, 0, 1)))
    assert swapped.block_tables[:, 0].tolist() == [4, 8]
