"""Encoded images, opened as images and nothing else.

Pillow takes a file for whatever its content says it is: PostScript under the name of a picture starts Ghostscript,
which runs it; a few bytes of PNG may stand for gigabytes of pixels. Whoever decodes an image that qdsim did not make
does it here.
"""

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP")
"""Those that folders of images are made of: what torchvision's ImageFolder looks for. None of them runs anything."""
MOST_PIXELS = 2**26
"""Some 8,000 x 8,000: more than any camera's, and 200 MB in memory."""


def decode_image(source: bytes | Path, formats: tuple[str, ...] = FORMATS) -> "Image.Image":
    """Return an image with its pixels in memory; raise ValueError in one line for whatever is none."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Path) and not source.is_file():  # a pipe would be waited for
        raise ValueError("is not a regular file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)
        with image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels; {MOST_PIXELS:,} at most are read")
            image.load()
            return image.copy()
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(formats)}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels") from None
    except ValueError:
        raise
    except Exception as error:  # Pillow raises what the damaged bytes make it raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(said) from None
