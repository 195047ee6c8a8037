"""How the processes of several ranks come to be, one file a way; all end as pipes for `engine.ranks`."""
