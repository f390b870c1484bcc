"""Upload an exported checkpoint to a hub repository with the user's token."""

from pathlib import Path

from moe_finetune.errors import CheckpointError


def check_push(repository: str) -> None:
    """Check what :func:`push_checkpoint` needs, before any work is done.

    Raises:
        CheckpointError: ``repository`` is not ``owner/name``, or there is no token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CheckpointError(f"--push {repository}: {error}") from None
    if repository.count("/") != 1:
        raise CheckpointError(f"--push {repository}: write it as owner/name")
    if get_token() is None:
        raise CheckpointError(
            f"--push {repository}: no token is set; run 'hf auth login' or set HF_TOKEN, or "
            "leave --push out"
        )


def push_checkpoint(folder: str | Path, repository: str, private: bool = False) -> str:
    """Upload all files of ``folder`` to ``repository``, created if missing; return its URL.

    Raises:
        CheckpointError: see :func:`check_push`, or the hub refused for the reason given. ``folder``
            stays.
    """
    from huggingface_hub import HfApi

    check_push(repository)
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # the hub's client raises exceptions of four libraries here
        raise CheckpointError(
            f"--push {repository}: the upload failed ({error}); {folder} is complete, upload it "
            f"later with 'hf upload {repository} {folder}'"
        ) from error
    return str(url)
