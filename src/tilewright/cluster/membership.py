"""The names of the replicas that take requests now.

Ray Serve copies the class of a router by value, makes the router of the copy, and gives nobody a reference to it: this
module is what the router and the server have in common.
"""

running: tuple[str, ...] = ()
