"""A first analysis, which shows what an analysis can read and where it can write."""
import json
import os
import platform
import socket

print(f"Hello from {os.getcwd()}")
print(f"Python {platform.python_version()}, user {os.getuid()}, host {socket.gethostname()}")

with open("result.json", "w") as out:
    json.dump({"answer": 42}, out)
print("wrote result.json into the working directory")

for path in ("/etc/shadow", "/root", "/home"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path).read()
        print(f"{path}: {found if found else 'empty'}")
    except OSError as error:
        print(f"{path}: {error.strerror}")

try:
    socket.create_connection(("127.0.0.1", 5432), timeout=2)
    print("reached PostgreSQL")
except OSError as error:
    print(f"PostgreSQL on 127.0.0.1:5432: {error.strerror or error}")
