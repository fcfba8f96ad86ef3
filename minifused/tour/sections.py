"""The stops of the tour, in the order of a tutorial."""

from minifused.tour.autotuning import AUTOTUNING
from minifused.tour.basics import ENVIRONMENT, MATMUL, VECTOR_ADD
from minifused.tour.cheat_sheet import CHEAT_SHEET
from minifused.tour.fusion import ATTENTION, EPILOGUE, SOFTMAX
from minifused.tour.introspection import INTROSPECTION
from minifused.tour.schedules import SCHEDULES
from minifused.tour.survival import SURVIVAL
from minifused.tour.verse import MODEL

SECTIONS = {
    section.name: section
    for section in (
        ENVIRONMENT, VECTOR_ADD, MATMUL, SCHEDULES, EPILOGUE, SOFTMAX, ATTENTION, AUTOTUNING,
        INTROSPECTION, SURVIVAL, MODEL, CHEAT_SHEET,
    )
}  # fmt: skip
