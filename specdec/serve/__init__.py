"""An OpenAI-compatible server on the scheduler: fields, prompts, the engine's thread, answers, endpoints, figures.

This folder needs the extra ``serve``.
"""
