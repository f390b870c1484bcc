"""A stand-in for the capture of experts in vLLM's GPU runner, which its CPU build does not have.

It notes what the routers select and places rows by request and position; rows of cached prompts
come from a store that a reset of the prefix cache empties. Everything after that is vLLM's own:
scheduler, output processor, server. As a program, with ``serve ...``, it is ``vllm serve`` with it.
"""

from functools import partial

import numpy as np


class Capture:
    """The rows of one model runner.

    ``store`` has the experts (decoder layers, K) of a token by all tokens up to it.
    """

    def __init__(self, runner):
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner, self.store, self.emitted, self.generation = runner, {}, {}, 0
        self.step, self.decoder_layers = {}, runner.model_config.hf_text_config.num_hidden_layers
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self.note, module.layer_id))

    def note(self, layer, index_TK):
        self.step[layer] = index_TK.cpu().numpy().copy()

    def begin(self, scheduled):
        generation = scheduled.aux_output_connector_metadata.generation
        if generation != self.generation:
            self.store, self.generation = {}, generation
        self.step = {}

    def keep(self, scheduled):
        """Store the step's rows; return the last position of each request."""
        batch, first, ends = self.runner.input_batch, 0, {}
        for place, request in enumerate(batch.req_ids):
            start = int(batch.num_computed_tokens_cpu[place])
            count = scheduled.num_scheduled_tokens[request]
            tokens = tuple(batch.token_ids_cpu[place, : start + count].tolist())
            for offset in range(count):
                rows = [self.step.get(layer) for layer in range(self.decoder_layers)]
                top_k = next(row for row in rows if row is not None).shape[1]
                experts = np.zeros((self.decoder_layers, top_k), np.uint8)
                for layer, row in enumerate(rows):
                    if row is not None:
                        experts[layer] = row[first + offset]
                self.store[tokens[: start + offset + 1]] = experts
            first += count
            ends[request] = tokens
        return ends

    def outputs(self, ends, sampled):
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        found = {}
        for request, tokens in ends.items():
            start = self.emitted.get(request, 0)
            rows = [self.store[tokens[: end + 1]] for end in range(start, len(tokens))]
            found[request] = AuxRequestOutput(start, np.stack(rows))
            if sampled[request]:
                self.emitted[request] = len(tokens)
        return found


def install():
    """From now on, engines of this process and its forks return experts on a CPU."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    execute, sample = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    def executed(self, scheduled, *args, **kwargs):
        if scheduled.aux_output_connector_metadata is None:
            return execute(self, scheduled, *args, **kwargs)
        if not hasattr(self, "_capture"):
            self._capture = Capture(self)
        self._capture.begin(scheduled)
        output = execute(self, scheduled, *args, **kwargs)
        self._ends = self._capture.keep(scheduled) if scheduled.total_num_scheduled_tokens else None
        return output

    def sampled(self, *args, **kwargs):
        output = sample(self, *args, **kwargs)
        ends = getattr(self, "_ends", None)
        if ends is not None:
            tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
            output.aux_output_connector_output = self._capture.outputs(ends, tokens)
            self._ends = None
        return output

    VllmConfig._verify_aux_output_compatibility = lambda self: None
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = executed, sampled


if __name__ in ("__main__", "__mp_main__"):  # vLLM spawns the process of its engine
    install()
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
