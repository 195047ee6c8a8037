"""Flags and variables that a release no longer has, and what does the same now, engine by engine.

What the inventories in `flags/` had and the newest lacks is all here (a test compares them); flags of
releases before the oldest are from public documentation. `None` stands where nothing does the same.
"""

from __future__ import annotations

from collections.abc import Mapping

Gone = tuple[str, str | None]  # why, what to write instead

_REMOVED = "nothing took its place"
_V0 = "it belonged to the first engine of vLLM, which was removed"
_LOOKAHEAD = "speculation is one JSON object now"
_SPEC = '--speculative-config \'{"method": "draft_model", "model": "PATH", "num_speculative_tokens": N}\''
_NGRAM = (
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": N, "prompt_lookup_max": N, '
    '"prompt_lookup_min": N}\''
)
_ROPE = "it is part of the model's config, which another flag overrides"
_ADAPTER = "prompt adapters were removed"
_POOL = "tokenizers are no longer a pool of processes"

VLLM: Mapping[str, Gone] = {
    "--block-manager": (_V0, None),
    "--calculate-kv-scales": ("scales of an FP8 cache come from the checkpoint, or are 1", None),
    "--cuda-graph-sizes": ("it was renamed", "--cudagraph-capture-sizes N ..."),
    "--device": ("vLLM finds the device itself", None),
    "--disable-async-output-proc": (_V0, None),
    "--disable-frontend-multiprocessing": (_REMOVED, None),
    "--disable-logprobs-during-spec-decoding": (_V0, None),
    "--disable-mm-preprocessor-cache": ("a size of 0 turns the cache off", "--mm-processor-cache-gb 0"),
    "--enable-lora-bias": (_REMOVED, None),
    "--enable-multimodal-encoder-data-parallel": ("it became a value", "--mm-encoder-tp-mode data"),
    "--enable-prompt-adapter": (_ADAPTER, None),
    "--enable-reasoning": ("naming a parser turns reasoning on", "--reasoning-parser NAME"),
    "--engine-use-ray": (_V0, None),
    "--guided-decoding-backend": (
        "it is a key of --structured-outputs-config now", "--structured-outputs-config.backend NAME",
    ),
    "--guided-decoding-disable-additional-properties": (
        "it is a key of --structured-outputs-config now",
        "--structured-outputs-config.disable_additional_properties true",
    ),
    "--guided-decoding-disable-any-whitespace": (
        "it is a key of --structured-outputs-config now",
        "--structured-outputs-config.disable_any_whitespace true",
    ),
    "--guided-decoding-disable-fallback": (_REMOVED, None),
    "--logits-processor-pattern": (_REMOVED, None),
    "--long-lora-scaling-factors": ("adapters of longer contexts are no longer supported", None),
    "--lora-extra-vocab-size": (_REMOVED, None),
    "--max-context-len-to-capture": (_REMOVED, None),
    "--max-long-partial-prefills": (_REMOVED, None),
    "--max-num-partial-prefills": (_REMOVED, None),
    "--max-prompt-adapter-token": (_ADAPTER, None),
    "--max-prompt-adapters": (_ADAPTER, None),
    "--max-seq-len-to-capture": (_REMOVED, None),
    "--multi-step-stream-outputs": (_V0, None),
    "--ngram-prompt-lookup-max": (_LOOKAHEAD, _NGRAM),
    "--ngram-prompt-lookup-min": (_LOOKAHEAD, _NGRAM),
    "--num-lookahead-slots": (_V0, None),
    "--num-scheduler-steps": (
        "steps are no longer joined; scheduling runs beside the device, --async-scheduling", None,
    ),
    "--num-speculative-tokens": (_LOOKAHEAD, _SPEC),
    "--override-attention-dtype": (_REMOVED, None),
    "--override-pooler-config": ("it was renamed", "--pooler-config '{...}'"),
    "--preemption-mode": (_REMOVED, None),
    "--qlora-adapter-name-or-path": ("adapters are named by --lora-modules", "--lora-modules NAME=PATH"),
    "--rope-scaling": (_ROPE, "--hf-overrides '{\"rope_parameters\": {...}}'"),
    "--rope-theta": (_ROPE, "--hf-overrides '{\"rope_parameters\": {\"rope_theta\": F}}'"),
    "--scheduler-delay-factor": (_V0, None),
    "--spec-decoding-acceptance-method": (_LOOKAHEAD, None),
    "--speculative-draft-tensor-parallel-size": (_LOOKAHEAD, _SPEC),
    "--speculative-max-model-len": (_LOOKAHEAD, _SPEC),
    "--speculative-model": (_LOOKAHEAD, _SPEC),
    "--swap-space": (
        "what is pushed out is computed anew, not copied to the host; --kv-offloading-size keeps KV blocks "
        "there for later requests", None,
    ),
    "--task": ("it became two", "--runner generate|pooling, with --convert embed|classify"),
    "--tokenizer-pool-extra-config": (_POOL, None),
    "--tokenizer-pool-size": (_POOL, None),
    "--tokenizer-pool-type": (_POOL, None),
    "--typical-acceptance-sampler-posterior-alpha": (_LOOKAHEAD, None),
    "--typical-acceptance-sampler-posterior-threshold": (_LOOKAHEAD, None),
    "--use-v2-block-manager": (_V0, None),
    "--worker-use-ray": ("it became a value", "--distributed-executor-backend ray"),
}  # fmt: skip

_SPARSITY = "double sparsity was removed"
_PIECES = "graphs of prefill are chosen with --cuda-graph-backend-prefill"
_NGRAM_TREE = "the tree is limited by --speculative-ngram-max-trie-depth"

SGLANG: Mapping[str, Gone] = {
    "--attention-reduce-in-fp32": ("it was renamed", "--triton-attention-reduce-in-fp32"),
    "--collect-tokens-histogram": (_REMOVED, None),
    "--cuda-graph-bs": ("prefill and decode have one each", "--cuda-graph-bs-decode N ..."),
    "--cuda-graph-max-bs": ("prefill and decode have one each", "--cuda-graph-max-bs-decode N"),
    "--custom-sigquit-handler": ("it is an argument of Engine, not of the command line", None),
    "--debug-tensor-dump-inject": (_REMOVED, None),
    "--debug-tensor-dump-prefill-only": (_REMOVED, None),
    "--disable-disk-cache": ("it was renamed", "--disable-outlines-disk-cache"),
    "--disable-flashinfer": ("it became a value", "--attention-backend triton"),
    "--disable-flashinfer-sampling": ("it became a value", "--sampling-backend pytorch"),
    "--disable-hicache-numa-detect": (_REMOVED, None),
    "--disable-mla": (_REMOVED, None),
    "--disable-regex-jump-forward": (_REMOVED, None),
    "--disaggregation-decode-dp": (_REMOVED, None),
    "--disaggregation-decode-tp": (_REMOVED, None),
    "--disaggregation-prefill-pp": (_REMOVED, None),
    "--ds-channel-config-path": (_SPARSITY, None),
    "--ds-heavy-channel-num": (_SPARSITY, None),
    "--ds-heavy-channel-type": (_SPARSITY, None),
    "--ds-heavy-token-num": (_SPARSITY, None),
    "--ds-sparse-decode-threshold": (_SPARSITY, None),
    "--enable-double-sparsity": (_SPARSITY, None),
    "--enable-flashinfer-cutlass-moe": ("it became a value", "--moe-runner-backend flashinfer_cutlass"),
    "--enable-flashinfer-mla": ("it became a value", "--attention-backend flashinfer"),
    "--enable-flashinfer-moe": ("it became a value", "--moe-runner-backend flashinfer_cutlass"),
    "--enable-flashinfer-mxfp4-moe": ("it became a value", "--moe-runner-backend flashinfer_mxfp4"),
    "--enable-flashinfer-trtllm-moe": ("it became a value", "--moe-runner-backend flashinfer_trtllm"),
    "--enable-flashmla": ("it became a value", "--attention-backend flashmla"),
    "--enable-nan-detection": (_REMOVED, None),
    "--enable-nsa-prefill-context-parallel": ("it was renamed", "--enable-prefill-cp"),
    "--enable-overlap-schedule": ("overlap is the default; --disable-overlap-schedule turns it off", None),
    "--enable-piecewise-cuda-graph": (_PIECES, None),
    "--enable-triton-kernel-moe": ("it became a value", "--moe-runner-backend triton_kernel"),
    "--hybrid-kvcache-ratio": ("it was renamed", "--swa-full-tokens-ratio F"),
    "--keep-mm-feature-on-device": ("--mm-feature-transport says where features are kept", None),
    "--mamba-scheduler-strategy": ("it was renamed", "--mamba-radix-cache-strategy NAME"),
    "--max-micro-batch-size": ("it was renamed", "--pp-max-micro-batch-size N"),
    "--max-num-reqs": ("it was renamed", "--max-running-requests N"),
    "--mm-max-concurrent-calls": (_REMOVED, None),
    "--mm-per-request-timeout": (_REMOVED, None),
    "--multi-item-scoring-delimiter": ("it is a switch now, and takes no token", "--enable-mis"),
    "--nsa-decode-backend": ("it was renamed", "--dsa-decode-backend NAME"),
    "--nsa-prefill-backend": ("it was renamed", "--dsa-prefill-backend NAME"),
    "--nsa-prefill-cp-mode": ("it was renamed", "--cp-strategy zigzag|interleave"),
    "--pdlb-url": (_REMOVED, None),
    "--piecewise-cuda-graph-compiler": (_PIECES, None),
    "--piecewise-cuda-graph-max-tokens": (_PIECES, None),
    "--piecewise-cuda-graph-tokens": (_PIECES, None),
    "--prefill-round-robin-balance": ("it was renamed", "--load-balance-method round_robin"),
    "--schedule-heuristic": ("it was renamed", "--schedule-policy NAME"),
    "--speculative-ngram-branch-length": (_NGRAM_TREE, None),
    "--speculative-ngram-max-match-window-size": (_NGRAM_TREE, None),
    "--speculative-ngram-min-match-window-size": (_NGRAM_TREE, None),
    "--stream-output": ("it was renamed", "--incremental-streaming-output"),
    "--torchao-config": (_REMOVED, None),
}  # fmt: skip

_TTS = "vocoders and speech models are no longer loaded by flags"

LLAMACPP: Mapping[str, Gone] = {
    "--ctx-size-draft": (_REMOVED, None),
    "-cd": (_REMOVED, None),
    "--direct-io": ("it is one of the values of --load-mode now", "--load-mode dio"),
    "--draft": ("drafts have flags of their own kind", "--spec-draft-n-max N"),
    "--draft-min": ("drafts have flags of their own kind", "--spec-draft-n-min N"),
    "--embd-bge-small-en-default": (_REMOVED, None),
    "--embd-e5-small-en-default": (_REMOVED, None),
    "--embd-gte-small-default": (_REMOVED, None),
    "--hf-file-v": (_TTS, None),
    "-hffv": (_TTS, None),
    "--hf-repo-v": (_TTS, None),
    "-hfrv": (_TTS, None),
    "-hfv": (_TTS, None),
    "--instruct": ("conversation is the default of llama-cli where the model has a template", None),
    "-ins": ("conversation is the default of llama-cli where the model has a template", None),
    "--memory-f32": ("it became a value", "--cache-type-k f32 --cache-type-v f32"),
    "--mlock": ("it is one of the values of --load-mode now", "--load-mode mlock"),
    "--model-vocoder": (_TTS, None),
    "-mv": (_TTS, None),
    "--mul-mat-q": (_REMOVED, None),
    "-mmq": (_REMOVED, None),
    "--no-mmap": ("it is one of the values of --load-mode now", "--load-mode none"),
    "--slots-endpoint-disable": ("it was renamed", "--no-slots"),
    "--spec-ngram-min-hits": ("each kind has its own", "--spec-ngram-simple-min-hits N"),
    "--spec-ngram-size-m": ("each kind has its own", "--spec-ngram-simple-size-m N"),
    "--spec-ngram-size-n": ("each kind has its own", "--spec-ngram-simple-size-n N"),
    "--spec-replace": (_REMOVED, None),
    "--tts-oute-default": (_TTS, None),
    "--tts-use-guide-tokens": (_TTS, None),
}  # fmt: skip


def _key(name: str) -> Gone:
    return (
        "it is a key of the options file, not a flag",
        f"{name} in the file of --extra_llm_api_options",
    )


TRTLLM: Mapping[str, Gone] = {
    "--attention_dp": _key("enable_attention_dp: true"),
    "--cuda_graph_config": _key("cuda_graph_config: {...}"),
    "--disable_overlap_scheduler": _key("disable_overlap_scheduler: true"),
    "--enable_attention_dp": _key("enable_attention_dp: true"),
    "--kv_cache_config": _key("kv_cache_config: {...}"),
    "--load_balancer": _key("moe_config: {load_balancer: FILE}"),
    "--moe_backend": _key("moe_config: {backend: NAME}"),
    "--moe_config": _key("moe_config: {...}"),
    "--moe_tensor_parallel_size": _key("moe_tensor_parallel_size: N"),
    "--quantization": ("weights have the format that the checkpoint is stored in", None),
    "--speculative_config": _key("speculative_config: {...}"),
    "--use_cuda_graph": _key("cuda_graph_config: {}"),
}  # fmt: skip
"""Documentation alone: what is passed in the file of --extra_llm_api_options."""

GONE_FLAGS: Mapping[str, Mapping[str, Gone]] = {
    "vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP, "trtllm": TRTLLM,
}  # fmt: skip

_MOE = "the kernels of experts are chosen with a flag"
_PROFILER = "the profiler has a flag of its own"

GONE_VARIABLES: Mapping[str, Gone] = {
    "VLLM_ALL2ALL_BACKEND": ("it is a flag now", "--all2all-backend NAME"),
    "VLLM_ATTENTION_BACKEND": ("it is a flag now", "--attention-backend NAME"),
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": (
        "it is a key of --attention-config", "--attention-config.disable_flashinfer_q_quantization true",
    ),
    "VLLM_FLASHINFER_MOE_BACKEND": (_MOE, "--moe-backend flashinfer_cutlass or flashinfer_trtllm"),
    "VLLM_FLASH_ATTN_VERSION": (
        "it is a key of --attention-config", "--attention-config.flash_attn_version N",
    ),
    "VLLM_MM_HASHER_ALGORITHM": ("it is a flag now", "--mm-hasher-algorithm NAME"),
    "VLLM_MM_INPUT_CACHE_GIB": ("it is a flag now", "--mm-processor-cache-gb F"),
    "VLLM_MXFP4_USE_MARLIN": (_MOE, "--moe-backend marlin"),
    "VLLM_TORCH_PROFILER_DIR": (
        _PROFILER, '--profiler-config \'{"profiler": "torch", "torch_profiler_dir": "DIR"}\'',
    ),
    "VLLM_USE_FLASHINFER_MOE_FP16": (_MOE, "--moe-backend flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_FP4": (_MOE, "--moe-backend flashinfer_cutlass or flashinfer_trtllm"),
    "VLLM_USE_FLASHINFER_MOE_FP8": (_MOE, "--moe-backend flashinfer_cutlass or flashinfer_trtllm"),
    "VLLM_USE_TRTLLM_ATTENTION": (
        "it is a key of --attention-config", "--attention-config.use_trtllm_attention true",
    ),
    "VLLM_USE_V1": ("there is one engine now", None),
    "VLLM_USE_TRITON_FLASH_ATTN": ("it is a flag now", "--attention-backend TRITON_ATTN"),
}  # fmt: skip
"""Variables that a release read and the newest does not, and what does the same; others have no entry."""
