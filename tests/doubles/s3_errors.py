"""How S3 says what is wrong."""

from tests.doubles.http_origin import Answer


def s3_error(status: int, code: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>double</Message></Error>'
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())
