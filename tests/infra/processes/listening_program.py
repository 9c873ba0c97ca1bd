"""A program that says its process id to whoever calls at the socket that was kept for it."""

import os

from streams.gateway.http.listener import inherit_listener

if __name__ == "__main__":
    listener = inherit_listener()
    assert listener is not None and "LISTEN_PID" not in os.environ
    listener.setblocking(True)
    print("up", flush=True)
    while True:
        with listener.accept()[0] as caller:
            caller.sendall(b"%d\n" % os.getpid())
