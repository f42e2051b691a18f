// Talks to the server: JSON and event streams by fetch. The API key lives in this tab's session storage and travels in
// a header only, never in an address.

const KEY = "everystop-api-key";

/** The server wants a key, or another one. */
export class KeyNeeded extends Error {}

/** The server has answered with an error; `status` is that of HTTP. */
export class ServerError extends Error {
  /** @param {string} message @param {number} status @param {number} retryAfter_s */
  constructor(message, status, retryAfter_s = 0) {
    super(message);
    this.status = status;
    this.retryAfter_s = retryAfter_s;
  }
}

/** @returns {string | null} */
export function storedKey() {
  return sessionStorage.getItem(KEY);
}

/** @param {string | null} key */
export function storeKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<Response>} */
async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = storedKey();
  if (key !== null) headers.set("Authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const message = await errorOf(answer);
  if (answer.status === 401) throw new KeyNeeded(message);
  throw new ServerError(message, answer.status, Number(answer.headers.get("Retry-After")) || 0);
}

/** @param {Response} answer @returns {Promise<string>} */
async function errorOf(answer) {
  try {
    return String((await answer.json()).error.message);
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/**
 * The JSON at a path. Throws KeyNeeded, ServerError, and TypeError where the server is not there.
 * @param {string} path @returns {Promise<any>}
 */
export async function getJson(path) {
  return (await ask(path)).json();
}

/**
 * The events of a stream, one after the other, until it ends; comments are passed over.
 * @param {string} path @param {AbortSignal} signal @param {unknown} [body] sent by POST if there is one
 * @returns {AsyncGenerator<string>}
 */
export async function* events(path, signal, body) {
  const post = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const answer = await ask(path, body === undefined ? { signal } : { signal, ...post });
  if (answer.body === null) return;
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const blocks = text.split(/\r?\n\r?\n/);
    text = /** @type {string} */ (blocks.pop());
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length > 0) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/** The question that is open. @type {Promise<void> | null} */
let asking = null;

/**
 * Ask for the key in a dialog of the page; resolves when one has been given, and stored. Who asks while it is open
 * waits for the same answer.
 * @param {string} why @returns {Promise<void>}
 */
export function askForKey(why) {
  asking ??= openDialog(why).finally(() => {
    asking = null;
  });
  return asking;
}

/** @param {string} why @returns {Promise<void>} */
function openDialog(why) {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("key-dialog"));
  const form = /** @type {HTMLFormElement} */ (dialog.querySelector("form"));
  const field = /** @type {HTMLInputElement} */ (dialog.querySelector("input"));
  const note = /** @type {HTMLElement} */ (dialog.querySelector("[data-why]"));
  note.textContent = storedKey() === null ? why : `The key given was not accepted: ${why}`;
  return new Promise((resolve) => {
    form.onsubmit = () => {
      storeKey(field.value.trim());
      field.value = "";
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
    if (!dialog.open) dialog.showModal();
  });
}
