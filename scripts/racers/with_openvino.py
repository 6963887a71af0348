"""OpenVINO's plain decoding of a GGUF file, for scripts/race.py."""

dependencies = ["openvino-genai==2026.4.1.0"]
variants = {"": {}}


def build(file, threads):
    """The function from a prompt's tokens, and how many are wanted, to seconds of the prompt and of a token."""
    import numpy
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads)
    wanted = openvino_genai.GenerationConfig(do_sample=False, ignore_eos=True)

    def answer(prompt, count):
        ids = numpy.array([prompt], dtype=numpy.int64)
        wanted.max_new_tokens = count
        given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        measured = pipeline.generate(given, wanted).perf_metrics
        return measured.get_ttft().mean / 1e3, measured.get_tpot().mean / 1e3

    return answer
