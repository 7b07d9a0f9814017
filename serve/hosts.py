"""The names of this server that a request may have in its Host header. No torch.

The owner of another site can let its name resolve to this machine (DNS rebinding). The browser then takes this server
for that site, and lets the site's page read the answers. Such a request has the name of that site in its Host header.
"""

import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/\[\]@]+)(?::\d*)?", re.IGNORECASE)
"""A Host header: a name or an address, IPv6 in brackets, and an optional port."""


class Hosts:
    """The hosts that requests may name, with any port, because a port may be forwarded.

    bound: the address that the server listens on, which is allowed. With a loopback address, localhost and all loopback
    addresses are allowed too. With 0.0.0.0 or ::, every address is allowed, because a site's name is never an address,
    and so are localhost and the name of the machine. more: further names, such as that of a proxy; "*": all.
    """

    def __init__(self, bound: str, more: Sequence[str] = ()):
        """Raises ValueError for a string that is not the name of a host, or has a port."""
        wrong = next((name for name in more if name != ANY and not _is_host(name)), None)
        if wrong is not None:
            raise ValueError(f"expected the name of a host, without scheme and port, found {wrong!r}")
        self.any, self._bound = ANY in more, _address(bound)
        self.names = {_plain(name) for name in (bound, *more)}
        if self._is_everywhere or _is_loopback(self._bound) or bound == "localhost":
            self.names |= {"localhost"}
        if self._is_everywhere:
            self.names |= {_plain(socket.gethostname()), _plain(socket.getfqdn())}

    def allow(self, header: bytes) -> bool:
        """Whether a Host header names this server."""
        found = HOST.fullmatch(header.decode("latin-1"))
        if self.any or found is None:
            return self.any
        name = _plain(found[1])
        address = _address(name)
        if address is None or name in self.names:
            return name in self.names
        return self._is_everywhere or "localhost" in self.names and _is_loopback(address)

    @property
    def _is_everywhere(self) -> bool:
        return self._bound is not None and self._bound.is_unspecified


def _plain(name: str) -> str:
    """A name for comparison: lower case, without brackets and without a dot at its end."""
    return name.strip("[]").rstrip(".").lower()


def _is_host(name: str) -> bool:
    found = HOST.fullmatch(name)
    return _address(name) is not None or found is not None and found[1] == name


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """The address in a string; None if the string is a name."""
    try:
        return ip_address(name.strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: IPv4Address | IPv6Address | None) -> bool:
    return address is not None and address.is_loopback
