"""Plain decoding of an ik_llama.cpp that was built on this machine, with run-time repacking, for scripts/race.py."""

from pathlib import Path

dependencies = None  # its library is loaded into an interpreter like ours
variants = {"repacked, flash attention": {"flash": True}, "repacked, without it": {"flash": False}}
SOURCE = Path(__file__).with_suffix(".c")


def loaded(checkout):
    """The functions of the C file beside this one, compiled with a checkout's headers and linked with its libraries."""
    import ctypes
    import subprocess
    import tempfile

    folders = {next(checkout.rglob(f"lib{name}.so")).parent for name in ("llama", "ggml")}
    linked = [word for own in folders for word in (f"-L{own}", f"-Wl,-rpath,{own}")]
    headers = (f"-I{checkout}/include", f"-I{checkout}/ggml/include")
    with tempfile.TemporaryDirectory() as made:
        command = [
            "cc",
            "-O2",
            "-shared",
            "-fPIC",
            *headers,
            SOURCE,
            "-o",
            f"{made}/racer.so",
            *linked,
            "-lllama",
            "-lggml",
        ]
        subprocess.run(command, check=True)
        found = ctypes.CDLL(f"{made}/racer.so")
    found.racer_open.restype = ctypes.c_void_p
    found.racer_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    found.racer_clear.argtypes = [ctypes.c_void_p]
    found.racer_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
    return found


def build(file, threads, flash, checkout):
    """The function from a prompt's tokens, and how many are wanted, to seconds of the prompt and of a token."""
    import ctypes
    from time import perf_counter

    library = loaded(Path(checkout))
    context = library.racer_open(file.encode(), threads, flash)
    if not context:
        raise OSError(f"ik_llama.cpp does not read {file}")

    def run(tokens, past):
        token = library.racer_run(context, (ctypes.c_int * len(tokens))(*tokens), len(tokens), past)
        if token < 0:
            raise OSError("ik_llama.cpp refuses these tokens")
        return token

    def answer(prompt, count):
        library.racer_clear(context)
        begun = perf_counter()
        token = run(prompt, 0)
        read = perf_counter()
        for n in range(count - 1):
            token = run([token], len(prompt) + n)
        return read - begun, (perf_counter() - read) / (count - 1)

    return answer
