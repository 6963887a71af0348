"""Union: several drafters in one tree, each as far as it pays.

``drafter`` is the one that is registered, ``merge`` the session, ``parts`` lays drafts into a tree, ``bandit`` judges.
"""
