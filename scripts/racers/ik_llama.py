"""ik_llama.cpp's plain decoding, with run-time repacking, for scripts/race.py."""

dependencies = ["ik-llama-cpp-python==0.1.5"]
variants = {"repacked, flash attention": {"flash": True}, "repacked, without it": {"flash": False}}


def build(file, threads, flash):
    """The function from a prompt's tokens, and how many are wanted, to seconds of the prompt and of a token."""
    from time import perf_counter

    import numpy
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkContext, IkModel
    from ik_llama_cpp.llama import make_batch_range, make_batch_single

    api.llama_backend_init()
    given = api.llama_model_default_params()
    given.use_mmap, given.repack_tensors, given.n_gpu_layers = False, True, 0
    model = IkModel.__new__(IkModel)
    model._model = api.llama_model_load_from_file(file.encode(), given)
    if not model._model:
        raise OSError(f"ik_llama.cpp does not read {file}")
    model._vocab = api.llama_model_get_vocab(model._model)
    model.n_vocab = api.llama_vocab_n_tokens(model._vocab)
    context = IkContext(model, n_ctx=2048, n_threads=threads, flash_attn=flash)

    def run(batch):
        failed = context.decode(batch)
        api.llama_batch_free(batch)
        if failed:
            raise OSError(f"llama_decode returned {failed}")
        logits = numpy.ctypeslib.as_array(context.get_logits(-1), (model.n_vocab,))
        return int(logits.argmax())  # the package's own way takes a loop over the tokens in Python

    def answer(prompt, count):
        context.kv_cache_clear()
        begun, size = perf_counter(), context._n_ubatch
        for at in range(0, len(prompt), size):
            token = run(make_batch_range(prompt[at : at + size], pos_start=at, logits_last=at + size >= len(prompt)))
        read = perf_counter()
        for n in range(count - 1):
            token = run(make_batch_single(token, len(prompt) + n))
        return read - begun, (perf_counter() - read) / (count - 1)

    return answer
