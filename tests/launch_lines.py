"""Launch lines as people write them: right ones, and wrong ones with what is to be found in them."""

RIGHT = [
    "vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --max-model-len 32768 --kv-cache-dtype fp8",
    "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 -dp 2 -ep --enable-eplb "
    '--eplb-config \'{"window_size":1000,"step_interval":3000,"num_redundant_experts":32}\'',
    "VLLM_USE_DEEP_GEMM=1 vllm serve deepseek-ai/DeepSeek-V3-0324 --data-parallel-size 16 "
    "--data-parallel-size-local 8 --data-parallel-address 10.99.48.128 --data-parallel-rpc-port 13345 "
    "--enable-expert-parallel --all2all-backend deepep_low_latency --api-server-count=8",
    "vllm serve deepseek-ai/DeepSeek-V3-0324 --headless -dp 16 -dpl 8 -dpr 8 -dpa 10.0.0.1 -dpp 13345 -ep",
    "python -m vllm.entrypoints.openai.api_server --model mistralai/Mixtral-8x7B-Instruct-v0.1 "
    "--tensor-parallel-size 2 --dtype bfloat16 --port 8000",
    'docker run --runtime nvidia --gpus all -v ~/.cache:/root/.cache --env "HF_TOKEN=$HF_TOKEN" -p 8000:8000 '
    "--ipc=host vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3-30B-A3B --enable-expert-parallel -tp 2",
    "vllm serve Qwen/Qwen3-235B-A22B --tensor-parallel-size 8 --enable-expert-parallel --reasoning-parser "
    "qwen3 --enable-auto-tool-choice --tool-call-parser hermes --gpu-memory-utilization 0.9",
    "vllm serve openai/gpt-oss-120b --tensor-parallel-size 4 --max-num-seqs 256 "
    "--max-num-batched-tokens 8192 --no-enable-prefix-caching",
    'vllm serve m --speculative-config \'{"method":"mtp","num_speculative_tokens":1}\' '
    '--compilation-config \'{"cudagraph_mode":"FULL_DECODE_ONLY"}\' -O3',
    'vllm serve m --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\' --port 8100',
    "vllm serve m --eplb-config.window_size 500 --enable-eplb -ep -tp 4 --served-model-name a b",
    "vllm serve m --tensor_parallel_size=8 --trust-remote-code --max-model-len 128k",
    "vllm serve m -tp 8 --decode-context-parallel-size 8 --dcp-comm-backend a2a",
    "vllm serve moonshotai/Kimi-K2-Instruct --tensor-parallel-size 16 --pipeline-parallel-size 2 --nnodes 4 "
    "--node-rank 0 --master-addr $HEAD --trust-remote-code",
    "vllm serve allenai/OLMoE-1B-7B-0125-Instruct --cpu-offload-gb 4 --dtype auto --seed 0",
    "export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1\nnohup vllm serve meta-llama/Llama-3.1-8B-Instruct \\\n"
    "  --max-model-len 200000 \\\n  --tensor-parallel-size 1 > server.log 2>&1 &",
    "NCCL_ALGO=Ring NCCL_SOCKET_IFNAME=eth0 vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 8",
    "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code "
    "--host 0.0.0.0 --port 30000",
    "python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-R1 --tp 16 "
    "--dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0 --trust-remote-code",
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256 python3 -m sglang.launch_server --model-path "
    "deepseek-ai/DeepSeek-V3-0324 --disaggregation-mode decode --disaggregation-transfer-backend nixl "
    "--tp-size 32 --attn-dp-size 32 --moe-a2a-backend deepep --deepep-mode low_latency "
    "--ep-num-redundant-experts 32 --enable-eplb --max-running-requests 4096 --moe-dense-tp-size 1",
    "sglang serve --model-path Qwen/Qwen3-30B-A3B --tp 4 --ep 4 --context-length 32768 "
    "--kv-cache-dtype fp8_e4m3 --reasoning-parser qwen3",
    "docker run --gpus all --shm-size 32g -p 30000:30000 --ipc=host lmsysorg/sglang:v0.5.23 python3 -m "
    "sglang.launch_server --model-path openai/gpt-oss-20b --host 0.0.0.0 --port 30000",
    "python -m sglang.launch_server --model-path m --moe-a2a-backend deepep --deepep-mode normal --tp 8 "
    "--expert-distribution-recorder-mode stat --init-expert-location trivial --enable-two-batch-overlap",
    "python -m sglang.launch_server --model-path m --kt-weight-path /w --kt-method AMXINT4 --kt-cpuinfer 64 "
    "--kt-threadpool-count 2 --kt-num-gpu-experts 32 --attention-backend triton",
    "kt run deepseek-v3 --gpu-experts 4 --cpu-threads 60 --numa-nodes 2 --tensor-parallel-size 1",
    "trtllm-serve deepseek-ai/DeepSeek-R1 --host localhost --port 8000 --backend pytorch "
    "--max_batch_size 161 "
    "--max_num_tokens 1160 --tp_size 8 --ep_size 8 --pp_size 1 --kv_cache_free_gpu_memory_fraction 0.95 "
    "--extra_llm_api_options ./extra.yml --reasoning_parser deepseek-r1",
    "trtllm-serve serve Qwen/Qwen3-30B-A3B --tp_size 4 --ep_size 2 --config opts.yaml",
    "llama-server -m gpt-oss-120b.gguf -c 0 -fa on --jinja --n-cpu-moe 24 -ngl 99 --host 0.0.0.0 --port 8080",
    "llama-cli -m model.gguf -p 'Hello # no comment' -n 128 -t 16 --temp 0.7 "
    r"-ot '\.ffn_(up|down|gate)_exps=CPU'",
    "llama-server -hf ggml-org/gpt-oss-20b-GGUF --ctx-size 32768 --jinja -ub 2048 -b 2048  # a comment",
    "numactl --interleave=all llama-server -m /models/q.gguf -cmoe --numa distribute -t 32 --load-mode mlock",
    "NCCL_DEBUG=INFO NCCL_BUFFSIZE=16777216 NCCL_MIN_NCHANNELS=16 ./build/alltoall_perf -b 8 -e 1G -f 2 -g 8",
    "mpirun -np 16 alltoall_perf -b 1M -e 8G -f 2 -g 1 -n 50 -w 10",
    "bash -c 'vllm serve m --port 9000'",
    "vllm serve deepseek-ai/DeepSeek-V3.1 -ep -tp 8 --enable-auto-tool-choice --tool-call-parser "
    "deepseek_v31 --chat-template examples/tool_chat_template_deepseekv31.jinja",
    "vllm serve zai-org/GLM-4.5-Air -tp 4 --tool-call-parser glm45 --reasoning-parser glm45 "
    "--enable-auto-tool-choice --disable-log-requests",
    "vllm serve m --attention-backend flashinfer --moe-backend flashinfer-trtllm --linear-backend auto "
    "--load-format runai_streamer --distributed-executor-backend ray --quantization fp8",
    "vllm serve m --quantization ascend --distributed-executor-backend my.package.Executor "
    "--reasoning-parser mine --reasoning-parser-plugin mine.py",
    "vllm serve m --max-num-seqs 256 --max-num-batched-tokens 256 --max-model-len 4096 -O 3",
    "vllm serve m -tp 8 -pcp 2 -dcp 16 --kv-offloading-size 8 --kv-offloading-backend native",
    "python -m sglang.launch_server --model-path m --enable-hierarchical-cache --hicache-ratio 2 "
    "--hicache-write-policy write_through --hicache-storage-backend mooncake --page-size 64 "
    "--chunked-prefill-size 8192",
    "python -m sglang.launch_server --model-path m --tp 8 --speculative-algorithm EAGLE "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
    "--tool-call-parser glm45 --attention-backend fa3",
    "python -m sglang.launch_server --model-path m --tp 16 --nnodes 2 --node-rank 1 --attn-dp-size 16 "
    "--enable-two-batch-overlap --dist-init-addr a:5000 --moe-dense-tp-size 1",
    "llama-server -m m.gguf -fa 1 -ctk q8_0 -ctv q8_0 --n-cpu-moe 28 -ngl 999 -c 0 -ub 4096 -b 4096 "
    "-sm layer -ts 3,1 -mg 0 --numa distribute --load-mode mmap+mlock",
    "llama-server -m m.gguf -ngl all --spec-draft-n-max 16 -md draft.gguf --reasoning-format none",
]

WRONG = [  # line, flag, rule, part of the suggestion
    (
        "vllm serve m -dp 2 --data-parallel-rank 3",
        "--data-parallel-rank",
        "rank-beyond-replicas",
        "--data-parallel-rank 1 or less",
    ),
    (
        "SGL_ENABLE_JIT_DEEPGEMM=1 sglang serve --model-path m",
        "SGL_ENABLE_JIT_DEEPGEMM",
        "deprecated-variable",
        "SGLANG_ENABLE_JIT_DEEPGEMM=1",
    ),
    (
        "vllm serve m --expert-parallel-size 8",
        "--expert-parallel-size",
        "other-engine",
        "--enable-expert-parallel",
    ),
    ("VLLM_EP_SIZE=8 vllm serve m", "VLLM_EP_SIZE", "fork-variable", "--enable-expert-parallel"),
    (
        "vllm serve mistralai/Mixtral-8x7B-Instruct",
        "mistralai/Mixtral-8x7B-Instruct",
        "unknown-model",
        "-v0.1",
    ),
    (
        "vllm serve m --moe-expert-replication-ratio 2",
        "--moe-expert-replication-ratio",
        "invented-flag",
        "--enable-eplb",
    ),
    (
        "python -m sglang.launch_server --model-path m --moe-expert-replication-ratio 2",
        "--moe-expert-replication-ratio",
        "invented-flag",
        "--ep-num-redundant-experts",
    ),
    ("ncclperf -t AllToAll -g 8", "ncclperf", "unknown-program", "alltoall_perf -b 8 -e 1G -f 2 -g 8"),
    ("NCCL_ALGO=Tree alltoall_perf -b 8 -e 1G", "NCCL_ALGO", "no-effect-on-all-to-all", "NCCL_BUFFSIZE"),
    ("NCCL_ALGO=Tree vllm serve m -dp 8 -ep", "NCCL_ALGO", "no-effect-on-all-to-all", "NCCL_BUFFSIZE"),
    (
        "NCCL_BUFF_SIZE=4194304 alltoall_perf -b 8 -e 1G",
        "NCCL_BUFF_SIZE",
        "misspelt-variable",
        "NCCL_BUFFSIZE",
    ),
    ("NCCL_MIN_NCHANELS=4 vllm serve m", "NCCL_MIN_NCHANELS", "unknown-variable", "NCCL_MIN_NCHANNELS"),
    ("torch.cuda.synchronize()", "torch.cuda.synchronize()", "device-wide-wait", "torch.cuda.Event"),
    ("python3 tools/s23_book_calc.py", "s23_book_calc.py", "unknown-program", "moesaic"),
    (
        "VLLM_ALL2ALL_BACKEND=pplx vllm serve m",
        "VLLM_ALL2ALL_BACKEND",
        "renamed-variable",
        "--all2all-backend",
    ),
    (
        "vllm serve m -dp 8 -ep --all2all-backend pplx",
        "--all2all-backend",
        "gone-value",
        "allgather_reducescatter",
    ),
    (
        "vllm serve m -dp 8 -ep --all2all-backend naive",
        "--all2all-backend",
        "gone-value",
        "allgather_reducescatter",
    ),
    ("vllm serve m --num-redundant-experts 8", "--num-redundant-experts", "renamed-flag", "--eplb-config."),
    ("vllm serve m --eplb-window-size 8", "--eplb-window-size", "renamed-flag", "window_size"),
    ("vllm serve m --eplb-step-interval 8", "--eplb-step-interval", "renamed-flag", "step_interval"),
    ("vllm serve m --eplb-log-balancedness", "--eplb-log-balancedness", "renamed-flag", "log_balancedness"),
    ("vllm serve m --expert-placement-file f", "--expert-placement-file", "unmerged-flag", "--enable-eplb"),
    ("vllm serve m --expert-map-path f", "--expert-map-path", "unmerged-flag", "--enable-eplb"),
    ("vllm serve m --load-path f", "--load-path", "unmerged-flag", "--enable-eplb"),
    ("vllm serve m --expert-load-stats-path f", "--expert-load-stats-path", "unmerged-flag", "--enable-eplb"),
    (
        "vllm serve m --moe-expert-cache-size 4",
        "--moe-expert-cache-size",
        "unmerged-flag",
        "--cpu-offload-gb",
    ),
    ("vllm serve m --moe-gpu-prefetch", "--moe-gpu-prefetch", "unmerged-flag", "--offload-backend"),
    ("vllm serve m --afd-config '{}'", "--afd-config", "fork-flag", "--additional-config"),
    ("vllm fserver m --port 1", "vllm fserver", "unknown-program", "--worker-cls"),
    ("sglang serve --model-path m --enable-ep-moe", "--enable-ep-moe", "removed-flag", "--ep-size"),
    (
        "sglang serve --model-path m --enable-deepep-moe",
        "--enable-deepep-moe",
        "renamed-flag",
        "--moe-a2a-backend",
    ),
    (
        "sglang serve --model-path m --enable-expert-distribution-metrics",
        "--enable-expert-distribution-metrics",
        "renamed-flag",
        "--expert-balancedness-report-mode",
    ),
    (
        "sglang serve --model-path m --enable-eplb-rebalance-async",
        "--enable-eplb-rebalance-async",
        "unmerged-flag",
        "--eplb-rebalance-layers-per-chunk",
    ),
    (
        "sglang serve --model-path m --kt-amx-weight-path w",
        "--kt-amx-weight-path",
        "renamed-flag",
        "--kt-weight-path",
    ),
    ("sglang serve --model-path m --kt-amx-method AMXINT4", "--kt-amx-method", "renamed-flag", "--kt-method"),
    (
        "sglang serve --model-path m --kt-gpu-experts-ratio 1",
        "--kt-gpu-experts-ratio",
        "fork-flag",
        "sglang-kt",
    ),
    (
        "sglang serve --model-path m --kt-expert-placement-strategy uniform",
        "--kt-expert-placement-strategy",
        "fork-flag",
        "sglang-kt",
    ),
    (
        "sglang serve --model-path m --kt-enable-dynamic-expert-update",
        "--kt-enable-dynamic-expert-update",
        "fork-flag",
        "sglang-kt",
    ),
    *(
        (
            f"sglang serve --model-path m --paged-experts-{end} x",
            f"--paged-experts-{end}",
            "unreleased-flag",
            "resident",
        )
        for end in ("store", "eviction", "kv-reserve-gb", "cold-backing", "cold-dir")
    ),
    ("llama-server -m x.gguf --no-mmap", "--no-mmap", "renamed-flag", "--load-mode none"),
    ("llama-server -m x.gguf --mlock", "--mlock", "renamed-flag", "--load-mode mlock"),
    *(
        (f"llama-server -m x.gguf {flag} 1", flag, "unmerged-flag", "--n-cpu-moe")
        for flag in ("--moe-hot-count", "--lazy-experts", "--pin-hot-experts", "--moe-stream-cache")
    ),
    # gone: replaced by something, or by nothing
    *(
        (f"vllm serve m {typed}", typed.split()[0], rule, part)
        for typed, rule, part in (
            ("--enable-reasoning", "renamed-flag", "--reasoning-parser"),
            ("--num-scheduler-steps 8", "removed-flag", "leave it out"),
            ("--device cuda", "removed-flag", "leave it out"),
            ("--swap-space 4", "removed-flag", "leave it out"),
            ("--guided-decoding-backend xgrammar", "renamed-flag", "-config.backend xgrammar"),
            ("--rope-scaling '{}'", "renamed-flag", "--hf-overrides"),
            ("--cuda-graph-sizes 8", "renamed-flag", "--cudagraph-capture-sizes"),
            ("--task embed", "renamed-flag", "--runner"),
            ("--worker-use-ray", "renamed-flag", "--distributed-executor-backend ray"),
            ("-O '{\"level\": 3}'", "renamed-flag", "--compilation-config '{\"level\": 3}'"),
            ("--cpu-offload-experts 4", "invented-flag", "--cpu-offload-params experts"),
            ("--enable-ep", "invented-flag", "--enable-expert-parallel"),
        )
    ),
    *(
        (f"sglang serve --model-path m {typed}", typed.split()[0], rule, part)
        for typed, rule, part in (
            ("--cuda-graph-max-bs 64", "renamed-flag", "--cuda-graph-max-bs-decode 64"),
            ("--enable-flashinfer-moe", "renamed-flag", "--moe-runner-backend flashinfer_cutlass"),
            ("--enable-triton-kernel-moe", "renamed-flag", "--moe-runner-backend triton_kernel"),
            ("--nsa-decode-backend fa3", "renamed-flag", "--dsa-decode-backend fa3"),
            ("--max-micro-batch-size 4", "renamed-flag", "--pp-max-micro-batch-size 4"),
            ("--enable-double-sparsity", "removed-flag", "leave it out"),
        )
    ),
    ("llama-server -m x.gguf --cpu-moe-layers 4", "--cpu-moe-layers", "invented-flag", "--n-cpu-moe N"),
    ("llama-server -m x.gguf --expert-parallel 4", "--expert-parallel", "other-engine", None),
    ("llama-server -m x.gguf --draft-max 16", "--draft-max", "renamed-flag", "--spec-draft-n-max 16"),
    ("trtllm-serve m --expert_parallel_size 8", "--expert_parallel_size", "other-engine", "--ep_size"),
    (
        "trtllm-serve m --enable_attention_dp",
        "--enable_attention_dp",
        "options-file",
        "enable_attention_dp: true",
    ),
    (
        "VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve m",
        "VLLM_ATTENTION_BACKEND",
        "renamed-variable",
        "--attention-backend FLASHINFER",
    ),
    ("VLLM_USE_V1=1 vllm serve m", "VLLM_USE_V1", "removed-variable", "leave it out"),
    ("VLLM_ALL2ALL_BACKND=x vllm serve m", "VLLM_ALL2ALL_BACKND", "unknown-variable", "--all2all-backend x"),
    # values, types, spelling
    ("vllm serve m --kv-cache-dtype int8", "--kv-cache-dtype", "wrong-choice", None),
    ("vllm serve m --quantization gptq_int4", "--quantization", "wrong-choice", None),
    ("vllm serve m --load-format gguff", "--load-format", "wrong-choice", None),
    ("vllm serve m --attention-backend flash-atn", "--attention-backend", "wrong-choice", "FLASH_ATTN"),
    ("vllm serve m --reasoning-parser deepseek-r1", "--reasoning-parser", "wrong-choice", "deepseek_r1"),
    (
        "sglang serve --model-path m --reasoning-parser deepseek_r1",
        "--reasoning-parser",
        "wrong-choice",
        "deepseek-r1",
    ),
    ("sglang serve --model-path m --kv-cache-dtype fp8", "--kv-cache-dtype", "wrong-choice", "fp8_e4m3"),
    ("llama-server -m x.gguf -ctk int8", "-ctk", "wrong-choice", None),
    ("vllm serve m --max-model-length 3", "--max-model-length", "unknown-flag", "--max-model-len"),
    ("vllm serve m --port abc", "--port", "wrong-value", None),
    ("vllm serve m --gpu-memory-utilization high", "--gpu-memory-utilization", "wrong-value", None),
    ("vllm serve m --enforce-eager=True", "--enforce-eager", "wrong-value", "--enforce-eager"),
    ("vllm serve m --dtype bf16", "--dtype", "wrong-choice", "--dtype bfloat16"),
    ("vllm serve m --eplb-config {window_size:3} --enable-eplb", "--eplb-config", "wrong-value", "quote"),
    ("vllm serve m --eplb-config '{\"windowsize\":3}'", "--eplb-config", "unknown-key", "window_size"),
    ("vllm serve m --enable-prefix-caching now", "now", "stray-word", None),
    ("vllm serve m \\ \n  -tp 8", "-tp", "cut-line", "backslash"),
    ("llama-server -m x.gguf -fa --jinja", "-fa", "wrong-value", "-fa on"),
    ("llama-cli -m x.gguf --port 80", "--port", "other-program", None),
    ("llama-server -m x.gguf -ot exps", "-ot", "wrong-value", "=CPU"),
    ("sglang serve --model-path m --enable", "--enable", "ambiguous-flag", None),
    # another engine's
    ("vllm serve m --tp-size 4", "--tp-size", "other-engine", "--tensor-parallel-size"),
    (
        "vllm serve m --mem-fraction-static 0.9",
        "--mem-fraction-static",
        "other-engine",
        "--gpu-memory-utilization",
    ),
    (
        "sglang serve --model-path m --max-model-len 4096",
        "--max-model-len",
        "other-engine",
        "--context-length",
    ),
    ("trtllm-serve m --tensor-parallel-size 4", "--tensor-parallel-size", "other-engine", "--tp_size"),
    # combinations
    (
        "vllm serve m -tp 4 --enable-eplb",
        "--enable-eplb",
        "balancer-needs-experts-apart",
        "--enable-expert-parallel",
    ),
    ("vllm serve m -ep", "--enable-expert-parallel", "no-effect", "--data-parallel-size"),
    (
        "vllm serve m --eplb-config.num_redundant_experts 8",
        "--eplb-config",
        "balancer-is-off",
        "--enable-eplb",
    ),
    ("vllm serve m -tp 6 -dcp 4", "--decode-context-parallel-size", "context-parallel-divides", "3"),
    (
        "vllm serve m -tp 8 --all2all-backend deepep_v2",
        "--all2all-backend",
        "no-effect",
        "--data-parallel-size",
    ),
    ("vllm serve m -dp 8 -ep --enable-dbo", "--enable-dbo", "overlap-needs-transport", "deepep_low_latency"),
    (
        "vllm serve m -dp 4 -dpl 8",
        "--data-parallel-size-local",
        "more-local-than-all",
        "--data-parallel-size",
    ),
    (
        "vllm serve m -tp 4 -ep --enable-eplb --eplb-config.communicator pynccl",
        "--eplb-config.communicator",
        "communicator-blocks",
        "use_async",
    ),
    ("vllm serve --port 8000", "model", "no-model", None),
    ("vllm serve --model m", "--model", "deprecated-flag", "vllm serve m"),
    (
        "sglang serve --model-path m --tp 8 --enable-eplb",
        "--enable-eplb",
        "balancer-needs-experts-apart",
        "--ep-size",
    ),
    (
        "sglang serve --model-path m --tp 8 --ep 8 --ep-dispatch-algorithm static",
        "--ep-dispatch-algorithm",
        "copies-differ-by-rank",
        "dynamic",
    ),
    (
        "sglang serve --model-path m --tp 8 --moe-a2a-backend deepep "
        "--expert-distribution-recorder-mode stat",
        "--deepep-mode",
        "recorder-needs-one-mode",
        "--deepep-mode normal",
    ),
    (
        "sglang serve --model-path m --tp 8 --moe-a2a-backend deepep --deepep-mode low_latency "
        "--expert-distribution-recorder-mode stat_approx",
        "--expert-distribution-recorder-mode",
        "recorder-needs-one-mode",
        "normal",
    ),
    (
        "sglang serve --model-path m --tp 8 --moe-a2a-backend deepep --attn-dp-size 8 "
        "--max-running-requests 2048",
        "--max-running-requests",
        "dispatch-buffer",
        "DISPATCH_TOKENS_PER_RANK=256",
    ),
    ("sglang serve --model-path m --tp 8 --ep 3", "--ep-size", "experts-over-ranks", "--ep-size 8"),
    ("sglang serve --model-path m --tp 8 --attn-dp-size 3", "--attn-dp-size", "groups-divide", "--tp-size"),
    (
        "sglang serve --model-path m --tp 8 --attn-dp-size 2 --dp-size 2",
        "--dp-size",
        "two-kinds-of-replicas",
        "one of them",
    ),
    (
        "sglang serve --model-path m --tp 8 --ep 8 --enable-eplb --eplb-rebalance-num-iterations 100 "
        "--expert-distribution-recorder-buffer-size 1000",
        "--expert-distribution-recorder-buffer-size",
        "buffer-over-interval",
        "100",
    ),
    (
        "sglang serve --model-path m --disable-cuda-graph",
        "--disable-cuda-graph",
        "deprecated-flag",
        "--cuda-graph",
    ),
    ("trtllm-serve m --tp_size 8 --ep_size 3", "--ep_size", "experts-over-ranks", "--ep_size 8"),
    (
        "cat > o.yaml <<EOF\nmoe_config:\n  load_balancer: b.yaml\nEOF\ntrtllm-serve m --tp_size 8 "
        "--config o.yaml",
        "load_balancer",
        "balancer-ignored",
        "enable_attention_dp: true",
    ),
    (
        "EXPERT_STATISTIC_ITER_RANGE=1-2 trtllm-serve m",
        "EXPERT_STATISTIC_ITER_RANGE",
        "no-effect",
        "STATISTIC_PATH",
    ),
    (
        "kt run m --kt-max-deferred-experts-per-token 6",
        "--kt-max-deferred-experts-per-token",
        "deferred-too-many",
        "4",
    ),
    ("alltoall_perf -b 1G -e 8M", "-b", "sizes-go-down", "-b 8M"),
    *(
        (f"vllm serve m {typed}", flag, rule, part)
        for typed, flag, rule, part in (
            (
                "-tp 8 -ep --enable-elastic-ep",
                "--enable-elastic-ep",
                "elastic-needs-balancer",
                "--enable-eplb",
            ),
            (
                "-tp 8 -ep --enable-elastic-ep --enable-eplb -pp 2",
                "-pp",
                "elastic-and-others",
                "one of the two",
            ),
            (
                "--enable-fault-tolerance --api-server-count 2",
                "--api-server-count",
                "one-api-server",
                "--api-server-count 1",
            ),
            (
                "--enable-auto-tool-choice",
                "--enable-auto-tool-choice",
                "needs-another",
                "--tool-call-parser",
            ),
            ("--enable-log-outputs", "--enable-log-outputs", "needs-another", "--enable-log-requests"),
            ("--numa-bind-nodes 0", "--numa-bind-nodes", "needs-another", "--numa-bind"),
            ("--data-parallel-external-lb", "--data-parallel-external-lb", "needs-another", "-size N"),
            (
                "--kv-offloading-backend native",
                "--kv-offloading-backend",
                "no-effect",
                "--kv-offloading-size",
            ),
            ("--cpu-offload-params experts", "--cpu-offload-params", "no-effect", "--cpu-offload-gb"),
            ("--dbo-decode-token-threshold 8", "--dbo-decode-token-threshold", "no-effect", "--enable-dbo"),
            ("--nnodes 2 --distributed-executor-backend ray", "--nnodes", "two-launchers", "mp"),
            (
                "--max-num-batched-tokens 64 --max-num-seqs 256",
                "--max-num-batched-tokens",
                "step-too-small",
                "256",
            ),
            (
                "--no-enable-chunked-prefill --max-num-batched-tokens 64 --max-model-len 128",
                "--max-num-batched-tokens",
                "step-too-small",
                "128",
            ),
            ("--gpu-memory-utilization 95", "--gpu-memory-utilization", "wrong-value", None),
            (
                "-tp 8 -pcp 2 -dcp 4",
                "--decode-context-parallel-size",
                "context-parallel-divides",
                "-size 2",
            ),
        )
    ),
    *(
        (f"sglang serve --model-path m {typed}", flag, rule, part)
        for typed, flag, rule, part in (
            (
                "--disable-radix-cache --enable-hierarchical-cache",
                "--disable-radix-cache",
                "one-of-two",
                "--enable-hierarchical-cache",
            ),
            ("--disable-radix-cache --enable-lmcache", "--disable-radix-cache", "one-of-two", "lmcache"),
            ("--hicache-size 8", "--hicache-size", "no-effect", "--enable-hierarchical-cache"),
            ("--tp 6 --nnodes 4", "--nnodes", "nodes-divide", "--tp-size 8"),
            ("--tp 8 --dp-size 2 --nnodes 2", "--dp-size", "replicas-on-one-node", "--attn-dp-size 2"),
            ("--tp 8 --moe-dense-tp-size 4", "--moe-dense-tp-size", "wrong-value", "-size 1"),
            (
                "--tp 8 --enable-two-batch-overlap",
                "--enable-two-batch-overlap",
                "overlap-needs-transport",
                "deepep",
            ),
            ("--export-metrics-to-file", "--export-metrics-to-file", "needs-another", "-dir"),
            ("--default-priority-value 1", "--default-priority-value", "no-effect", "-scheduling"),
            ("--retraction-policy priority", "--retraction-policy", "needs-another", "-scheduling"),
            (
                "--disable-cuda-graph-padding --enable-torch-compile",
                "--disable-cuda-graph-padding",
                "one-of-two",
                "one of the two",
            ),
            ("--served-model-name a:b", "--served-model-name", "wrong-value", "a-b"),
            ("--chunked-prefill-size 100 --page-size 64", "--chunked-prefill-size", "pages-divide", "128"),
        )
    ),
    ("llama-server -m x.gguf -ngl 0 --split-mode row", "--split-mode", "no-effect", "--gpu-layers 99"),
    ("llama-server -m x.gguf -sm none -ts 3,1", "-ts", "no-effect", "--split-mode layer"),
    ("llama-server -m x.gguf -ub 4096", "--ubatch-size", "no-effect", "--batch-size 4096"),
    ("llama-server -m x.gguf -ctv q8_0 -fa off", "-ctv", "needs-flash-attention", "--flash-attn on"),
    # what the model forbids
    ("vllm serve deepseek-ai/DeepSeek-V3 -tp 3", "-tp", "heads-divide", "2 or 4"),
    (
        "vllm serve deepseek-ai/DeepSeek-V3 -dp 3 -ep --enable-eplb",
        "-ep",
        "slots-divide",
        "2 redundant experts",
    ),
    ("vllm serve deepseek-ai/DeepSeek-V3 -tp 32", "-tp", "blocks-divide", "expert parallelism"),
    (
        "vllm serve meta-llama/Llama-3.1-8B --max-model-len 999999",
        "--max-model-len",
        "context-too-long",
        "131072",
    ),
    (
        "vllm serve mistralai/Mixtral-8x7B-v0.1 --quantization awq",
        "--quantization",
        "format-of-checkpoint",
        "checkpoint",
    ),
]
