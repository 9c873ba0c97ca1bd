// What a simulated engine that is told what to say says in the turns of an agent's loop.
export const TURNS = 5, LAST = `Done after ${TURNS}.`;

export const answerScript = (text, thought = "Hm.") => `⟦${thought}\n</think>\n\n${text}⟧`;

export const callsText = (...calls) => calls
  .map(([name, args]) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`)
  .join("\n");

export const script = (turn) => turn === TURNS
  ? answerScript(LAST, "All read.")
  : answerScript(callsText(["read_file", { path: String(turn) }]), `Step ${turn}.`);

export const ALL = Array.from({ length: TURNS }, (_, turn) => String(turn));
