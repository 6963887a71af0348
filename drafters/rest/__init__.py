"""REST: copies what followed the text's last tokens in a datastore.

``drafter`` proposes, ``datastore`` is a corpus with its suffix array, and ``cli`` builds datastores.
"""
