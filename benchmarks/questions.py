"""What the comparison asks, and where the answers are: numbers of ours by benchmark and metric,
those of others by the id of their reference point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from results import Result

Results = Mapping[str, Result]


@dataclass(frozen=True, slots=True)
class Ours:
    """One number of ours and where it is stored."""

    what: str
    benchmark: str
    metric: str
    unit: str = "s"

    def value(self, results: Results) -> float | None:
        """None if it has not been measured."""
        metrics = results.get(self.benchmark, {}).get("metrics", {})
        value = metrics.get(self.metric)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared, with those of ours and those of others (ids of reference points)."""

    title: str
    ours: tuple[Ours, ...]
    before: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    figure: str = ""
    """A plot of its own, beside that of the numbers."""


_ONE_GPU_OR_MORE = (("", "vllm_elastic"), (", one GPU for all", "vllm_elastic_shared_rounds"))

QUESTIONS = (
    Question(
        "How long does a scale-up take?",
        (
            Ours("vLLM, joiners from images", "vllm_elastic", "up_image_s"),
            Ours("vLLM, joiners from parked", "vllm_elastic", "up_parked_s"),
            Ours("vLLM, 1 -> 2, a joiner that was kept alive", "vllm_elastic", "up_kept_s"),
            Ours("vLLM, joiners cold", "vllm_elastic", "up_cold_s"),
            Ours("upstream vLLM, joiners cold, in the same run", "vllm_elastic", "upstream_up_s"),
            Ours("upstream vLLM, one GPU for all", "vllm_elastic_shared", "upstream_up_s"),
            Ours(
                "vLLM there, from parked, until in force (then it failed)",
                "vllm_elastic_shared",
                "up_parked_in_vain_s",
            ),
            Ours(
                "vLLM there, from an image, until in force (then it failed)",
                "vllm_elastic_shared",
                "up_image_in_vain_s",
            ),
            Ours("reference engine, joiners from images", "gpu_scale", "up_image_s"),
            Ours("reference engine, joiners from parked", "gpu_scale", "up_parked_s"),
            Ours("reference engine on the CPU, 2 -> 4, from images", "cpu_scale", "up_s"),
        ),
        ("vllm031_up_first_s", "vllm031_up_s", "vllm033_up_s", "vllm033_restart_s"),
        ("vllm_v4_up_s", "vllm_v4_restart_s"),
    ),
    Question(
        "How long does a scale-down take?",
        (
            Ours("vLLM, 2 -> 1, the worst (gave up waiting)", "vllm_elastic", "down_s"),
            Ours("vLLM, 2 -> 1, the first", "vllm_elastic", "first_down_s"),
            Ours("upstream vLLM, in the same run", "vllm_elastic", "upstream_down_s"),
            Ours("vLLM, 3 -> 2, one GPU for all", "vllm_elastic_shared", "down_s"),
            Ours("upstream vLLM, there", "vllm_elastic_shared", "upstream_down_s"),
            Ours("reference engine", "gpu_scale", "down_s"),
        ),
        ("vllm031_down_s", "vllm033_down_s"),
        ("vllm_v4_down_s",),
    ),
    Question(
        "How long do users wait in between: the longest gap between two tokens of one stream?",
        (
            Ours("vLLM, up", "vllm_elastic", "gap_up_s"),
            Ours("vLLM, down, the worst", "vllm_elastic", "gap_down_s"),
            Ours("vLLM, down, the first", "vllm_elastic", "first_gap_down_s"),
            Ours("vLLM, a stream that moves", "vllm_elastic", "moved_gap_max_s"),
            Ours("upstream vLLM, up, in the same run", "vllm_elastic", "upstream_gap_up_s"),
            Ours("upstream vLLM, down, in the same run", "vllm_elastic", "upstream_gap_down_s"),
            Ours("vLLM, down, one GPU for all", "vllm_elastic_shared", "gap_down_s"),
            Ours("upstream vLLM, down, there", "vllm_elastic_shared", "upstream_gap_down_s"),
            Ours("reference engine, up", "gpu_scale", "token_gap_up_max_s"),
            Ours("reference engine, down", "gpu_scale", "token_gap_down_max_s"),
            Ours("reference engine, a stream that moves", "gpu_scale", "moved_gap_max_s"),
            Ours("on the CPU, up and down", "cpu_scale", "token_gap_max_ms", "ms"),
        ),
        ("vllm031_gap_up_s", "vllm031_gap_down_s", "vllm033_gap_up_s", "vllm033_gap_down_s"),
        ("vllm_v4_up_downtime_s", "vllm_v4_down_downtime_s"),
    ),
    Question(
        "How many requests fail?",
        (
            Ours("vLLM", "vllm_elastic", "requests_failed", "requests"),
            Ours(
                "upstream vLLM, in the same run",
                "vllm_elastic",
                "upstream_requests_failed",
                "requests",
            ),
            Ours("reference engine", "gpu_scale", "requests_failed", "requests"),
            Ours("on the CPU, 20 cycles", "cpu_scale", "requests_failed", "requests"),
            Ours("vLLM on the CPU, replicas", "vllm_cpu_replicas", "requests_failed", "requests"),
            Ours("planner-driven, with kills", "planner_cycle", "requests_failed", "requests"),
        ),
        ("vllm031_failed", "vllm033_failed"),
    ),
    Question(
        "How long until one engine is there?",
        (
            Ours("a GPU process with graphs, from its image", "snapshot_tiers", "image_restore_s"),
            Ours("the same, from parked", "snapshot_tiers", "parked_restore_s"),
            Ours("the same, cold", "snapshot_tiers", "cold_s"),
            Ours("vLLM on the CPU, from its image", "vllm_cpu_replicas", "ready_restored_s"),
            Ours("vLLM on the CPU, cold", "vllm_cpu_replicas", "ready_cold_s"),
            Ours("reference engine on the CPU, from its image", "cpu_scale", "ready_restored_s"),
            Ours("reference engine on the CPU, cold", "cpu_scale", "ready_cold_s"),
            Ours("size of a GPU process's image", "snapshot_tiers", "image_bytes", "bytes"),
        ),
        ("vllm031_restart_s", "vllm033_restart_s"),
        (
            "dynamo_snapshot_s",
            "dynamo_snapshot_cold_s",
            "dynamo_snapshot_outside_s",
            "dynamo_snapshot_image_gib",
            "modelexpress_ready_s",
            "modelexpress_cold_s",
            "foundry_s",
            "foundry_cold_s",
        ),
    ),
    Question(
        "How fast are weights, and graphs, in place?",
        (
            Ours("weights, GPU to GPU", "gpu_stream", "best_gbps", "GB/s"),
            Ours("of the copy rate of the same run", "gpu_stream", "best_of_copy", "x"),
            Ours("rebinding the graphs to a new group", "gpu_rebind", "rebind_s"),
            Ours("capturing them anew", "gpu_rebind", "recapture_s"),
            Ours("vLLM: experts", "vllm_elastic_moves", "staged_pool_gbytes_per_s", "GB/s"),
            Ours(
                "upstream vLLM, in the same run",
                "vllm_elastic_moves",
                "read_in_place_pool_gbytes_per_s",
                "GB/s",
            ),
            Ours("vLLM: dense weights", "vllm_elastic_moves", "dense_gbytes_per_s", "GB/s"),
        ),
        (),
        ("modelexpress_weights_s", "modelexpress_gpu_gbps"),
    ),
    Question(
        "What does the control plane bear?",
        (
            Ours("fake ranks", "control_plane", "ranks", "ranks"),
            Ours("admission of all of them", "control_plane", "admission_s"),
            Ours("transaction of the commit, p99", "control_plane", "commit_p99_ms", "ms"),
            Ours("until a rank has heard, p99", "control_plane", "watch_p99_ms", "ms"),
            Ours("simulation off by", "simulate", "sim_rel_err", "x"),
        ),
    ),
    Question(
        "A joiner of a vLLM group dies: how long has nobody who stays a token?",
        (
            *(
                Ours(f"vLLM, {what}{where}", result, f"fault_{name}_silent_s")
                for where, result in _ONE_GPU_OR_MORE
                for what, name in (
                    ("killed when it was restored", "joiner_killed_restored"),
                    ("killed in the middle of its weights", "joiner_killed_in_stream"),
                    ("killed when it was ready", "joiner_killed_ready"),
                    ("killed at the commit", "joiner_killed_at_commit"),
                    ("stopped in the middle of its weights", "joiner_stopped_in_stream"),
                    ("stopped when it was ready", "joiner_stopped_ready"),
                )
            ),
            *(
                Ours(f"upstream vLLM, {what}", "vllm_elastic", f"upstream_fault_{name}_silent_s")
                for what, name in (
                    ("killed in its cold start", "joiner_killed_in_cold_start"),
                    ("killed at the commit", "joiner_killed_at_commit"),
                )
            ),
            *(
                Ours(f"vLLM: {what}{where}", result, metric, unit)
                for where, result in _ONE_GPU_OR_MORE
                for what, metric, unit in (
                    ("tokens that were wrong", "faults_wrong_tokens", "tokens"),
                    (
                        "faults after which the next operation failed",
                        "faults_next_failed",
                        "faults",
                    ),
                )
            ),
            Ours(
                "upstream vLLM: the same",
                "vllm_elastic",
                "upstream_faults_next_failed",
                "faults",
            ),
        ),
    ),
    Question(
        "A vLLM group goes up and down again and again: what grows, as a share?",
        (
            *(
                Ours(f"{what}{where}", result, metric, unit)
                for where, result in _ONE_GPU_OR_MORE
                for what, metric, unit in (
                    ("rounds", "rounds", "rounds"),
                    ("host memory of a rank", "rounds_rss_bytes_growth", "x"),
                    ("GPU memory of a rank", "rounds_gpu_bytes_growth", "x"),
                    ("descriptors of a rank", "rounds_descriptors_growth", "x"),
                    ("threads of a rank", "rounds_threads_growth", "x"),
                    ("time of a scale-up", "rounds_up_s_growth", "x"),
                    ("time of a scale-down", "rounds_down_s_growth", "x"),
                    (
                        "log-likelihood of a prompt, largest difference",
                        "prompts_max_abs_err",
                        "nat",
                    ),
                )
            ),
        ),
    ),
    Question(
        "The load of a vLLM group doubles: how long do 95 % wait for a first token, at most?",
        (
            Ours("a small group", "vllm_elastic", "ramp_small_p95_s"),
            Ours("a large group", "vllm_elastic", "ramp_large_p95_s"),
            Ours("scaled up in the middle", "vllm_elastic", "ramp_scaled_p95_s"),
            Ours("restarted in the middle", "vllm_elastic", "ramp_restarted_p95_s"),
            Ours(
                "upstream restarted in the middle", "vllm_elastic", "upstream_ramp_restarted_p95_s"
            ),
            Ours("scaled up: failed", "vllm_elastic", "ramp_scaled_failed", "requests"),
            Ours("restarted: failed", "vllm_elastic", "ramp_restarted_failed", "requests"),
        ),
        figure="vllm_elastic_ramp",
    ),
)
