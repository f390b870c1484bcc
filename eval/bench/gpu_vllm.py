"""Greedy tokens from vLLM with expert parallelism, in a process of ``gpu_check.py``."""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    engine = LLM(
        model=job["folder"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=job["ranks"],
        enable_expert_parallel=True,
        gpu_memory_utilization=0.3,
        max_model_len=64,
    )
    options = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    (found,) = engine.generate([{"prompt_token_ids": job["ids"]}], options)
    print(json.dumps(list(found.outputs[0].token_ids)))


if __name__ == "__main__":
    main()
