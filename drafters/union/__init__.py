"""Union: several drafters in one tree, each as far as it pays.

``drafter`` is registered, ``merge`` has the session, ``parts`` puts drafts into one tree, ``bandit`` judges each part.
"""
