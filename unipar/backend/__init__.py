"""Contract for backends: description, engine and joining; and how installed backends are found and checked."""

from unipar.backend.description import Backend as Backend
from unipar.backend.description import Capabilities as Capabilities
from unipar.backend.description import NoOptions as NoOptions
from unipar.backend.description import Variant as Variant
from unipar.backend.engine import Category as Category
from unipar.backend.engine import Engine as Engine
from unipar.backend.engine import Factor as Factor
from unipar.backend.engine import Fn as Fn
from unipar.backend.engine import Holding as Holding
from unipar.backend.engine import LossFn as LossFn
from unipar.backend.engine import Mark as Mark
from unipar.backend.engine import Micro as Micro
from unipar.backend.engine import Part as Part
from unipar.backend.engine import Piece as Piece
from unipar.backend.engine import Read as Read
from unipar.backend.engine import Region as Region
from unipar.backend.engine import Step as Step
from unipar.backend.expert_tokens import ExpertTokens as ExpertTokens
from unipar.backend.precision import Dtypes as Dtypes
