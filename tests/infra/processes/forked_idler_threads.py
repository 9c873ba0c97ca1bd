"""A module that leaves a thread behind when it is imported."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
