"""The other end of `squall.doctor.speeds`: a program that sends back one byte for each message it has received whole.

It is run by its file name, so that it starts in milliseconds; it imports nothing of Squall.

    python echo.py DESCRIPTOR BYTES
"""

import socket
import sys


def serve(connection: socket.socket, num_bytes: int) -> None:
    """Answer until the other end closes.

    A message is one byte, or, if that byte is not 0, `num_bytes` after it.
    """
    memory = memoryview(bytearray(num_bytes))
    while head := connection.recv(1):
        if head != b"\0":
            got = 0
            while got < num_bytes:
                count = connection.recv_into(memory[got:])
                if not count:
                    return
                got += count
        connection.sendall(b"a")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
