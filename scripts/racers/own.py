"""specdec's plain decoding, for scripts/race.py."""

dependencies = None  # it runs in the environment of the script
variants = {"": {"activations": "default"}, "int8 rows": {"activations": "int8"}}


def build(file, threads, activations):
    """The function from a prompt's tokens, and how many are wanted, to seconds of the prompt and of a token."""
    import torch

    from specdec import Engine

    torch.set_num_threads(threads)
    engine = Engine.from_pretrained(file, drafter="none", activations=activations)

    def answer(prompt, count):
        found = engine.generate(prompt, count).stats
        if found.new_tokens < 2:
            raise ValueError("this prompt's answer ends at once; take another one")
        return found.seconds.prefill, found.seconds.decode / (found.new_tokens - 1)

    return answer
