"""Where and with which credentials a client uploads one object: the keyword arguments of boto3's S3 client."""

from pydantic import BaseModel, Field


class UploadKeys(BaseModel):
    """``aws_session_token`` alone is checked; the other two are constants, which clients need to sign requests."""

    aws_access_key_id: str = "bdn"
    aws_secret_access_key: str = Field(default="bdn", repr=False)
    aws_session_token: str = Field(repr=False)
    endpoint_url: str
    region_name: str = "us-east-1"


class UploadCredentials(BaseModel):
    """The place of one object, and the credentials to upload it there."""

    s3_bucket: str
    s3_key: str
    creds: UploadKeys
