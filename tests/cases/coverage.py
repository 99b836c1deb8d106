"""Which tests prove which case of the catalogue, and which cases cannot be run, with the reason.

Tests of this folder carry `pytest.mark.case("ST-04")`, and `test_variants.py` runs whatever has
variants. Here are the tests of other folders, and what is missing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.cases.catalogue import catalogue

FOLDER = Path(__file__).parent
VARIANTS = (
    "tests/cases/test_variants.py::"
    "test_a_variant_gets_its_status_at_once_and_the_next_request_is_served"
)

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "ST-01": (
        "server/test_chat::test_an_answer_is_the_same_text_streamed_and_whole",
        "server/test_detokenizer::test_any_bytes_give_the_text_of_a_whole_decode",
    ),
    "ST-02": (
        "server/test_chat::test_a_cut_inside_a_character_ends_with_one_replacement_character",
    ),
    "ST-04": (
        "server/test_chat::test_a_stop_string_over_token_borders_ends_the_text_before_it",
        "server/test_stop_strings::test_the_result_does_not_depend_on_how_the_text_was_cut",
    ),
    "ST-07": (
        "server/test_chat::test_a_stream_has_role_first_finish_last_and_one_identity",
        "server/test_chat::test_usage_comes_last_alone_and_equals_the_whole_answers",
    ),
    "ST-08": (
        "server/test_chat::test_an_answer_that_fills_the_context_ends_with_length_and_done",
        "scheduler/test_scheduler::test_a_full_context_ends_it_with_length",
    ),
    "ST-10": (
        "server/test_streams::test_a_client_that_leaves_frees_its_sequences",
        "server/test_streams::test_a_client_that_leaves_before_the_first_token_frees_its_sequence",
        "scheduler/test_scheduler::test_an_abort_in_any_phase_frees_everything_at_once",
    ),
    "ST-13": (
        "server/test_streams::test_headers_and_comments_come_while_the_engine_is_silent",
        "server/test_streams::test_the_openai_client_gets_the_same_text_both_ways",
    ),
    "ST-14": ("server/test_streams::test_headers_and_comments_come_while_the_engine_is_silent",),
    "ST-16": (
        "server/test_streams::test_a_reader_that_stops_gets_all_its_text_later_and_delays_nobody",
        "server/test_step_merge::test_outputs_nobody_took_are_merged_into_one",
    ),
    "TP-01": (
        "server/test_prompt::"
        "test_a_template_without_a_system_role_gets_the_text_in_the_first_user_turn",
    ),
    "TP-03": (
        "server/test_prompt::"
        "test_a_later_system_message_stays_where_it_is_if_the_template_takes_it",
        "server/test_prompt::"
        "test_a_strict_template_gets_later_system_messages_in_order_in_the_next_user_turn",
    ),
    "TP-07": (
        "server/test_prompt::test_tool_arguments_are_a_mapping_in_the_template",
        "server/test_messages::test_missing_and_empty_arguments_are_an_empty_mapping",
    ),
    "TP-09": ("server/test_prompt::test_control_tokens_that_a_user_typed_forge_no_turn",),
    "TP-11": (
        "server/test_prompt::test_a_continued_message_ends_the_prompt_to_the_byte",
        "server/test_prompt::test_a_trailing_assistant_message_is_a_finished_turn_without_the_flag",
    ),
    "TP-12": (
        "server/test_chat::test_a_prefill_is_not_repeated_and_its_text_fires_no_stop",
        "server/test_prompt::test_an_empty_continued_message_is_a_normal_generation_prompt",
    ),
    "TP-13": (
        "server/test_template::test_a_hostile_template_is_refused",
        "server/test_template::test_attributes_lead_nowhere",
        "server/test_template::test_a_loop_that_prints_nothing_is_ended",
        "server/test_template::test_what_real_templates_use_works",
    ),
    "PA-01": (
        "engine/test_sampler::test_a_tiny_temperature_survives_large_logits",
        "server/test_sampling::test_top_p_zero_is_greedy",
    ),
    "PA-04": (
        "engine/test_sampler::test_a_repetition_penalty_lowers_a_negative_logit",
        "engine/test_sampler::test_a_penalty_of_one_is_identical_to_none",
        "test_whole_engine::test_a_prefix_hit_equals_a_miss",
    ),
    "PA-10": ("server/test_chat::test_n_choices_have_their_own_index_seed_role_and_end",),
    "PA-12": (
        "server/test_logprobs::test_infinities_and_nan_become_the_floor",
        "engine/test_sampler::test_logprobs_are_finite_and_never_above_zero",
    ),
    "PA-13": ("server/test_chat::test_logprobs_carry_the_true_bytes_of_partial_characters",),
    "PA-14": (
        "server/test_sampling::test_a_bad_logit_bias_is_refused",
        "engine/test_sampler::test_bias_moves_and_forbids_tokens",
    ),
    "PA-15": (
        "test_whole_engine::test_the_same_seed_gives_the_same_tokens_and_another_seed_others",
        "server/test_supervision::"
        "test_greedy_and_seeded_streams_of_the_real_loop_survive_two_kills_unchanged",
    ),
    "PA-20": (
        "server/test_parameters::test_unknown_and_harmless_fields_are_ignored_and_logged_once",
    ),
    "CC-03": (
        "scheduler/test_step_fuzz::"
        "test_everybody_gets_the_text_of_being_alone_and_no_block_is_lost",
        "test_whole_engine::test_batched_equals_alone",
    ),
    "CC-04": (
        "test_whole_engine::test_preempted_equals_undisturbed",
        "scheduler/test_priority::test_growth_takes_blocks_from_the_lowest_rank_and_both_texts_are_as_alone",
    ),
    "CC-06": (
        "scheduler/test_priority::test_eight_growing_sequences_in_an_exhausted_pool_all_finish",
    ),
    "CC-07": (
        "scheduler/test_priority::"
        "test_a_high_arrival_gets_a_seat_at_the_next_step_and_the_victim_is_undisturbed",
        "scheduler/test_priority::test_an_equal_arrival_never_pushes_anybody_out_however_long_it_waits",
    ),
    "CC-09": (
        "scheduler/test_priority::test_running_streams_get_their_token_in_every_step_of_a_long_prefill",
        "scheduler/test_policy::test_the_first_prefill_leaves_a_quarter_to_others_if_there_are_any",
        "test_whole_engine::test_chunked_prefill_equals_whole",
    ),
    "CC-10": (
        "scheduler/test_priority::"
        "test_a_long_prompt_progresses_in_every_step_under_a_steady_decode_load",
    ),
    "CC-12": (
        "server/test_engine_client::"
        "test_the_queue_holds_exactly_seats_plus_queue_and_refuses_the_rest_with_numbers",
        "server/test_engine_client::test_retry_after_follows_the_measured_rate",
        "server/test_chat::test_what_the_engine_refuses_is_an_http_error_for_streams_too",
    ),
    "CC-13": (
        "server/test_middleware::test_keys_have_prefix_caches_of_their_own_and_without_keys_all_share",
        "server/test_sampling::test_a_chosen_salt_never_reaches_another_keys_scope",
        "scheduler/test_kv_manager::test_a_salt_separates_and_the_empty_one_shares",
    ),
    "CC-14": (
        "scheduler/test_block_hash::test_a_digest_has_128_bits_and_depends_on_tokens_parent_and_salt",
        "scheduler/test_block_hash::test_a_salt_that_spells_out_a_block_does_not_meet_that_block",
    ),
    "CC-15": (
        "scheduler/test_scheduler::test_an_abort_between_schedule_and_commit_is_passed_over",
        "server/test_engine_client::test_leaving_in_the_middle_drops_late_outputs_and_harms_nobody",
    ),
    "EM-01": (
        "server/test_embeddings::test_base64_is_of_little_endian_float32_and_float_is_the_default",
        "server/test_embeddings::test_openais_client_gets_the_vectors_whatever_format_it_asks_for",
    ),
    "EM-02": (
        "server/test_embeddings::test_every_form_of_input_gives_a_vector_per_text",
        "server/test_embeddings::test_inputs_that_are_none_are_refused",
    ),
    "EM-03": (
        "server/test_embeddings::test_values_that_cannot_be_done_are_refused_by_name",
        "server/test_embeddings::test_dimensions_shorten_and_normalize_again",
    ),
    "HT-03": (
        "server/test_middleware::test_a_missing_or_wrong_key_is_a_401_before_the_body_is_read",
        "server/test_middleware::test_every_configured_key_opens",
        "server/test_middleware::test_an_empty_key_cannot_be_configured",
    ),
    "HT-05": (
        "server/test_middleware::test_a_preflight_needs_no_key_and_allows_what_sdks_send",
        "server/test_middleware::test_a_page_of_another_site_may_not_drive_the_model_unless_allowed",
    ),
    "HT-06": (
        "server/test_middleware::test_errors_carry_cors_headers_and_an_id",
        "server/test_middleware::test_a_401_carries_cors_headers_too",
    ),
    "HT-07": ("server/test_json_body::test_a_bad_body_is_one_sentence",),
    "HT-09": ("server/test_parameters::test_thousands_of_wrong_messages_cost_one_short_error",),
    "HT-10": ("server/test_parameters::test_a_lone_surrogate_anywhere_is_a_json_400",),
    "HT-11": ("server/test_json_body::test_deep_nesting_is_refused_quickly",),
    "HT-13": (
        "server/test_shutdown::test_sigterm_lets_running_answers_finish_and_refuses_new_ones",
        "server/test_shutdown::"
        "test_streams_that_outlast_the_drain_end_with_an_error_event_in_bounded_time",
        "server/test_shutdown::test_a_second_signal_ends_the_server_at_once",
        "server/test_shutdown::test_loading_is_visible_and_sigterm_ends_it_quickly",
    ),
    "HT-14": (
        "server/test_ops::test_an_engine_that_makes_no_tokens_is_alive_but_not_ready",
        "server/test_supervision::test_a_stalled_engine_is_killed_and_its_request_resumed",
        "server/test_shutdown::test_an_engine_killed_in_the_middle_of_http_streams_changes_no_text",
    ),
    "MF-01": (
        "engine/test_gguf_reader::test_a_model_cut_anywhere_is_refused",
        "engine/test_gguf_reader::test_a_header_cut_at_any_byte_says_download_again",
        "engine/test_gguf_reader::test_one_missing_byte_names_the_tensor_and_both_sizes",
    ),
    "MF-02": (
        "engine/test_gguf_reader::test_what_is_not_a_gguf_is_called_by_its_name",
        "engine/test_gguf_reader::test_pipes_and_dangling_links_are_recognised_without_blocking",
        "engine/test_gguf_reader::test_a_device_is_not_opened",
    ),
    "MF-04": (
        "engine/test_bundle::test_file_names_that_leave_the_folder_are_refused",
        "server/test_model_store::test_a_given_name_cannot_leave_the_cache",
        "server/test_sources::test_members_that_leave_the_archive_are_refused",
    ),
    "MF-07": (
        "server/test_shutdown::"
        "test_a_server_whose_only_model_fails_to_load_exits_with_the_reason_as_last_line",
        "server/test_models::test_a_model_that_fails_to_load_leaves_the_others_usable",
        "engine/test_exporter::test_an_interrupted_import_leaves_nothing",
        "engine/test_exporter::test_a_full_disk_is_explained",
    ),
    "MF-08": (
        "engine/test_gguf_reader::test_any_power_of_two_is_an_alignment",
        "engine/test_gguf_reader::"
        "test_trailing_bytes_unknown_keys_and_another_order_change_nothing",
        "engine/test_gguf::test_settings_that_we_do_not_compute_are_refused",
        "engine/test_gguf_split::test_the_parts_are_the_model",
        "engine/test_gguf_split::test_a_missing_part_is_named",
    ),
    "TK-01": (
        "server/test_tokenizer::test_bos_is_put_once_and_only_if_wanted",
        "server/test_completions::test_text_gets_one_bos_and_the_empty_text_needs_one",
        "engine/test_gguf_tokenizer::test_bos_follows_the_file_and_then_the_format",
    ),
    "TK-03": (
        "engine/test_gguf_tokenizer::"
        "test_unknown_and_missing_pre_tokenizers_are_errors_that_list_the_known",
        "engine/test_gguf_tokenizer::test_each_pre_tokenizer_splits_as_published",
        "engine/test_tokenizer_equality::"
        "test_byte_level_bpe_in_both_formats_gives_the_ids_of_transformers",
    ),
    "TK-05": (
        "server/test_detokenizer::"
        "test_sentencepiece_spaces_survive_and_only_the_very_first_may_be_dropped",
        "server/test_chat::"
        "test_the_first_space_of_a_sentencepiece_answer_goes_but_not_when_continuing",
        "engine/test_tokenizer_equality::"
        "test_sentencepiece_in_every_format_gives_the_ids_of_sentencepiece",
    ),
    "TK-07": (
        "engine/test_gguf_tokenizer::test_end_tokens_are_the_union_of_every_source_the_named_ones_first",
        "engine/test_gguf_tokenizer::test_special_ids_out_of_range_are_refused",
        "server/test_chat::test_ignore_eos_goes_on_and_hides_the_end_token",
        "scheduler/test_scheduler::test_a_stop_token_ends_it_is_reported_and_wins_over_length",
    ),
    "MM-01": (
        "parity/test_parity::test_logits_agree_with_transformers",
        "engine/test_rope::test_llama3_keeps_short_waves_and_slows_long_ones",
        "engine/test_hf_config::test_settings_that_are_not_done_are_refused_by_name",
    ),
    "MM-02": (
        "parity/test_parity::test_logits_agree_with_transformers",
        "engine/test_rope::test_long_rope_chooses_its_divisors_by_the_engines_longest_sequence",
    ),
    "MM-03": (
        "parity/test_parity::test_logits_agree_with_transformers",
        "parity/test_parity::test_the_same_model_as_a_gguf_agrees",
        "engine/test_hf_config::test_rope_is_read_in_the_old_and_the_new_spelling",
    ),
    "MM-04": (
        "parity/test_parity::test_logits_agree_with_transformers",
        "parity/test_parity::test_a_setting_that_is_dropped_is_seen",
    ),
    "MM-05": ("parity/test_windows::test_rejected_drafts_leave_no_trace_in_a_window",),
    "MM-10": (
        "test_speculation::test_a_draft_model_with_another_vocabulary_is_refused",
        "test_speculation::test_the_loader_gives_both_models_the_same_number_of_blocks",
    ),
    "NP-01": (
        "engine/test_npu_compiler::test_contexts_of_another_provider_are_made_again",
        "engine/test_context_store::test_contexts_of_another_recipe_are_outdated",
        "engine/test_npu_opening::test_contexts_that_are_refused_are_made_anew_once",
    ),
    "NP-06": (
        "engine/test_npu_compiler::test_all_groups_are_compiled_and_progress_counts_graphs",
        "engine/test_npu_engine::test_the_cpu_serves_until_the_npu_is_open",
        "engine/test_npu_compiler::test_the_compiling_process_does_not_outlive_who_started_it",
    ),
    "MM-08": (
        "model/test_quality::test_the_imported_model_predicts_as_the_file_does",
        "model/test_quality::test_the_guard_knows_which_kv_formats_this_model_bears",
        "engine/test_attention::test_quantizing_errs_by_half_a_step_at_most",
        "engine/test_kv_format::test_what_has_4_bits_is_padded_to_multiples_of_32",
        "test_whole_engine::test_a_prefix_hit_equals_a_miss",
    ),
    "MM-09": (
        "scheduler/test_worker::test_right_drafts_are_accepted_wrong_ones_cost_nothing_but_time",
        "scheduler/test_verify::test_drafts_stand_up_to_the_first_that_was_not_sampled",
        "scheduler/test_step_fuzz::"
        "test_everybody_gets_the_text_of_being_alone_and_no_block_is_lost",
        "test_speculation::test_answers_are_equal_to_those_without_drafts",
    ),
    "NP-02": (
        "engine/test_npu_compiler::"
        "test_a_compiler_that_dies_again_and_again_is_an_error_that_names_the_graph",
        "server/test_supervision::test_a_crash_loop_ends_in_failed_with_the_count_and_the_last_exit",
        "server/test_shutdown::test_loading_is_visible_and_sigterm_ends_it_quickly",
    ),
    "NP-03": (
        "engine/test_dispatcher::test_a_fault_in_any_segment_costs_no_token",
        "engine/test_dispatcher::"
        "test_strictly_a_step_is_refused_with_the_reason_when_the_npu_stays_away",
        "server/test_npu_hang::test_a_hang_costs_a_pause_and_no_token",
        "scheduler/test_worker::test_a_device_that_is_gone_fails_every_sequence_and_not_the_loop",
        "scheduler/test_worker::test_a_step_that_fails_once_is_simply_tried_again",
    ),
    "NP-08": (
        "engine/test_dispatcher::test_what_fails_at_opening_leaves_the_cpu_at_work",
        "engine/test_dispatcher::test_strictly_what_fails_at_opening_ends_the_start",
        "engine/test_placement::test_npu_is_refused_with_what_was_found",
        "engine/test_placement::test_auto_says_why_it_is_the_cpu",
        "engine/test_loader::test_an_npu_that_is_not_there_is_refused",
    ),
}
"""Tests of other folders, as `folder/module::function` below `tests/`."""

PARTLY: Mapping[str, str] = {
    "CC-14": "one KV format and one device per engine process, so their caches never meet",
    "RS-01": "a short run; tests/bench/soak.py does thousands of requests and prints the slope",
    "NP-01": "in the emulator, with recorded versions; no real device has loaded a context yet",
    "NP-03": "on a simulated device that fails at every phase",
}
"""Cases of which a part cannot be run yet."""

NOT_APPLICABLE: Mapping[str, str] = {}
"""Cases that say nothing about this program, with the reason."""


def marked(folder: Path = FOLDER) -> dict[str, tuple[str, ...]]:
    """Tests of this folder by the case that their marks name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for case_id in _marks(node):
                    found[case_id].append(f"tests/cases/{path.name}::{node.name}")
    return {case_id: tuple(tests) for case_id, tests in found.items()}


def _marks(function: ast.FunctionDef) -> list[str]:
    """The names in decorators like `@pytest.mark.case("ST-04")`."""
    return [
        str(decorator.args[0].value)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) == "pytest.mark.case"
        and isinstance(decorator.args[0], ast.Constant)
    ]


def covering_tests() -> dict[str, tuple[str, ...]]:
    """The ids of all tests that prove a case, for every case that has one."""
    here = marked()
    found = {}
    for case in catalogue().values():
        variants = tuple(f"{VARIANTS}[{case.id}-{i}]" for i in range(len(case.variants)))
        elsewhere = tuple(_test_id(short) for short in ELSEWHERE.get(case.id, ()))
        if tests := variants + here.get(case.id, ()) + elsewhere:
            found[case.id] = tests
    return found


def _test_id(short: str) -> str:
    module, _, function = short.partition("::")
    return f"tests/{module}.py::{function}"
