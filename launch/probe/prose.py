"""Ordinary prose, to be put together by text.py: sentence patterns, what goes into them, an ending."""

PARTS = {
    "who": (
        "the miller", "my older sister", "a retired surveyor", "the woman from the bakery",
        "our neighbour", "the new teacher", "an electrician named Rosa", "the boy with the kite",
        "the last tenant", "a cousin of the mayor", "the night porter", "the cellist upstairs",
        "a botanist on leave", "the ferryman", "the younger of the two brothers", "the translator",
        "a driver I had met before", "the apprentice", "the man who mends clocks", "the librarian",
        "somebody from the council", "the widow at number nine", "the physician", "a student of geology",
    ),
    "other": (
        "the gardener", "her brother", "the old captain", "the printer", "his landlady", "the two of them",
        "the children", "a stranger", "the inspector", "the whole street", "an aunt in the north",
        "the innkeeper", "the choir", "the council", "our guide", "the mechanic", "the girls next door",
        "the postman", "the committee", "a man in a grey coat",
    ),
    "thing": (
        "a crate of unripe pears", "the key to the attic", "an unsigned letter", "a map of the drains",
        "the second volume", "a jar of copper nails", "the broken barometer", "a bicycle without a chain",
        "three yards of green cloth", "the parish accounts", "a box of photographs", "the ladder",
        "a kettle that whistled flat", "an umbrella nobody claimed", "the spare lamp",
        "a bag of seed potatoes", "the only good saw", "a receipt from the year before", "the piano stool",
        "a telescope in its case", "the recipe for the black bread", "a coil of wet rope",
        "the minutes of the meeting", "a tin of varnish",
    ),
    "place": (
        "behind the tannery", "at the edge of the marsh", "in the room above the stables", "by the weir",
        "on the landing", "in the station buffet", "under the railway bridge", "outside the chapel",
        "near the old customs house", "at the top of the quarry", "in the orchard",
        "beside the allotments", "on the slow train to the coast", "in the reading room",
        "at the far end of the pier", "between the two bakeries", "in the cellar of the inn",
        "along the canal", "in the school yard", "where the road forks",
    ),
    "when": (
        "after the first frost", "on the morning of the auction", "late in August",
        "before anyone was awake", "while it was still raining", "the week the bridge was closed",
        "on a Thursday", "towards evening", "in the year of the flood", "just as the shops were closing",
        "once the guests had left", "a few days before the election", "during the long strike",
        "at half past six", "that same winter", "in the middle of the harvest", "when the power failed",
        "on the last day of term", "some time after midnight", "before the snow had melted",
    ),
    "why": (
        "because the roof had begun to leak", "to settle an argument about the price of coal",
        "since nobody else could read the handwriting", "for reasons that were never explained",
        "in the hope of being asked to stay", "as a favour to the harbour master",
        "because the dog would not stop barking", "to prove that the well was deeper than it looked",
        "though the doctor had advised against it", "out of plain curiosity",
        "because two of the windows faced the wrong way", "to save the cost of a stamp",
        "although the meeting had been moved", "as if it were the most natural thing in the world",
        "for want of anything better to do", "because the tide would not wait",
        "to keep a promise made years earlier", "without telling a soul",
    ),
    "mood": (
        "rather pleased", "short of breath", "unusually quiet", "in no hurry", "a little ashamed",
        "wide awake", "less certain than before", "covered in flour", "cheerful in spite of everything",
        "tired of waiting", "relieved", "suspicious", "on the point of laughing", "too cold to speak",
        "ready to leave",
    ),
}  # fmt: skip

PATTERNS = (
    "{who} left {thing} {place} {when}, {why}.",
    "{when}, {who} found {thing} {place} and gave it to {other}.",
    "it was {who} who told {other} about {thing}, {why}.",
    "nobody {place} had expected {who} to arrive {when}, let alone {mood}.",
    "{who} asked {other} for {thing}, and came away {mood}.",
    "there was a rumour that {who} had hidden {thing} {place}.",
    "{place}, {who} met {other} {when}; neither of them mentioned {thing}.",
    "if {who} had not been {mood}, {other} would never have seen {thing}.",
    "{when} {other} heard that {who} was selling {thing}, {why}.",
    "what {who} remembered best was {thing}, lying {place} {when}.",
    "{who} and {other} walked on {place}, {mood}, {why}.",
    "for a month {who} kept {thing} {place}, {why}, and said nothing to {other}.",
    "“I would sooner lose {thing},” said {who}, {mood}, {when}.",
    "{other} laughed when {who} came in {mood} with {thing}.",
    "{who} had written to {other} {when}, {why}, but the answer spoke only of {thing}.",
    "the trouble with {thing}, as {who} explained {place}, was that {other} had paid for it.",
    "{why}, {who} went back {place} {when} and looked for {thing}.",
    "by the time {who} reached {other} {place}, the matter of {thing} had been settled.",
    "{who} grew {mood} whenever {other} spoke of {thing}.",
    "{when}, {place}, {thing} changed hands twice, {why}.",
    "{other} would have bought {thing} from {who}, had it not been standing {place}.",
    "neither {who} nor {other} could say how {thing} had come to be {place}.",
    "{who} measured {thing} twice {when} and was {mood} both times.",
    "people {place} still talk of how {who} carried {thing} past {other}, {why}.",
)

CLOSING = (
    "By then the argument about the mill had lasted longer than the mill itself was likely to. The two "
    "families no longer quarrelled over the water, which had moved to another bed in the spring floods, "
    "but over what the water had once been worth, and each of them kept a drawer of papers to prove it. I "
    "was asked to read through both drawers because I had no relations in the valley and no opinion about "
    "wheat. It took me most of a week. There were deeds, and copies of deeds, and a long complaint in "
    "verse; there was a drawing of a wheel that could never have turned. On the fifth evening, at the "
    "bottom of the second drawer, I came upon a small envelope that neither family had mentioned. Inside "
    "it was"
)
