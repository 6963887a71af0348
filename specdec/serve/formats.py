"""Formats of strings that structured output follows, as schemas; other formats are annotations, as JSON Schema says.

Each allows what the format's own standard and Python's parsers both take: days that exist, no leap seconds, hosts with
letters, digits and single hyphens.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FORMATS"]

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits that four divides, without 00
_LEAP = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:[0-5][0-9])"

_COUNT = "[0-9]{1,6}"
_DAYS = f"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
_SECONDS = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DURATION = f"P({_DAYS}({_SECONDS})?|{_SECONDS}|{_COUNT}W)"

_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,31}"
_HOST = f"{_LABEL}(\\.{_LABEL})*"
_LOCAL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = f"{_LOCAL}+(\\.{_LOCAL}+)*@([A-Za-z0-9]+(-[A-Za-z0-9]+)*\\.)+[A-Za-z]{{2,}}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"({_OCTET}\\.){{3}}{_OCTET}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        f"::({_GROUP}(:{_GROUP}){{0,6}})?",
        *(f"{_GROUP}(:{_GROUP}){{{left - 1}}}::({_GROUP}(:{_GROUP}){{0,{6 - left}}})?" for left in range(1, 7)),
        f"{_GROUP}(:{_GROUP}){{6}}::",
    ]
)
_HEX = "[0-9A-Fa-f]"
_PATH = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = "([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_URI = (
    f"[A-Za-z][A-Za-z0-9+.-]*:(//{_HOST}(:[0-9]{{1,4}})?(/{_PATH}*)*|{_PATH}+(/{_PATH}*)*)(\\?{_QUERY}*)?(#{_QUERY}*)?"
)
_POINTER = "(/([^/~]|~[01])*)*"

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "duration": {"pattern": f"^{_DURATION}$"},
    "email": {"pattern": f"^{_EMAIL}$"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "ipv4": {"pattern": f"^{_IPV4}$"},
    "ipv6": {"pattern": f"^({_IPV6})$"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]*)(#|{_POINTER})$"},
    "time": {"pattern": f"^{_TIME}$"},
    "uri": {"pattern": f"^{_URI}$"},
    "uuid": {"pattern": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$"},
}
