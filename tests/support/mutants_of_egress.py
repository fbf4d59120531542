"""Breakages of the egress guard's rules: (file, what is wrong, what stands there, what the mutant says instead)."""

from __future__ import annotations

from tests.support.mutants_of_cache import Mutant

EGRESS: list[Mutant] = [
    (
        "egress/special_addresses.py",
        "half of the carriers' addresses are public",
        '("100.64.0.0/10", _SHARED)',
        '("100.64.0.0/11", _SHARED)',
    ),
    (
        "egress/special_addresses.py",
        "an IPv4-mapped address is one of IPv6",
        "address.ipv4_mapped or IPv6Address(int(address))",
        "IPv6Address(int(address))",
    ),
    (
        "egress/special_addresses.py",
        "what NAT64 carries does not count",
        "        return special_kind(IPv4Address(int(address) & 0xFFFFFFFF))\n",
        "        return None\n",
    ),
    ("egress/special_addresses.py", "6to4 is read one byte too far", ">> 80 & 0xFFFFFFFF", ">> 88 & 0xFFFFFFFF"),
    (
        "egress/special_addresses.py",
        "Azure's metadata address is public",
        '        ("168.63.129.16/32", _METADATA),  # Azure\'s host, in a public range\n',
        "",
    ),
    (
        "egress/special_addresses.py",
        "IPv6 that was never given out is public",
        "return None if address in _GLOBAL_UNICAST else _RESERVED",
        "return None",
    ),
    (
        "egress/special_addresses.py",
        "a unique-local address is public",
        '        ("fc00::/7", _UNIQUE_LOCAL),\n',
        '        ("fc00::/8", _UNIQUE_LOCAL),\n        ("2400::/6", _RESERVED),\n',
    ),
    (
        "egress/written_hosts.py",
        "leading zeros are decimal alone",
        "for octal in (True, False):",
        "for octal in (False,):",
    ),
    (
        "egress/written_hosts.py",
        "leading zeros are octal alone",
        "for octal in (True, False):",
        "for octal in (True,):",
    ),
    ("egress/written_hosts.py", "a last dot makes another name", '.lower().removesuffix(".")', ".lower()"),
    (
        "egress/written_hosts.py",
        "digits of other scripts are letters",
        'host.encode("idna").decode("ascii").lower()',
        "host.lower()",
    ),
    ("egress/written_hosts.py", "the last number fills one byte alone", "last >= 1 << (8 * left)", "last > 0xFF"),
    (
        "egress/written_hosts.py",
        "a number may be too large for its byte",
        "any(number > 0xFF for number in first) or ",
        "",
    ),
    (
        "egress/rules.py",
        "a suffix admits itself",
        "host.name.endswith(self.suffixes)",
        'f".{host.name}".endswith(self.suffixes)',
    ),
    (
        "egress/rules.py",
        "a spelling is as good as its better reading",
        "if kind and (read.readings or all(kinds)):",
        "if kind and all(kinds):",
    ),
    (
        "egress/rules.py",
        "the address that a name resolves to is told",
        'f"it resolves to {kind}")',
        'f"it resolves to {kind} {text}")',
    ),
    (
        "egress/rules.py",
        "only the first address of a name is judged",
        "        for text in addresses:\n",
        "        for text in list(addresses)[:1]:\n",
    ),
    (
        "egress/rules.py",
        "names below localhost are public",
        'name in _LOOPBACK_NAMES or name.endswith(".localhost")',
        "name in _LOOPBACK_NAMES",
    ),
    (
        "egress/rules.py",
        "a listed name does not admit what it resolves to",
        "        read = _read(host)\n        if self._names(read):\n            return\n",
        "        read = _read(host)\n",
    ),
    ("egress/rules.py", "the zone of an address is taken for a name", "return not host.readings and (", "return ("),
    (
        "egress/rules.py",
        "an entry may be spelled in any way",
        "    if host.name not in (str(host.readings[0]), host.readings[0].exploded):\n",
        "    if not host.name:\n",
    ),
]
