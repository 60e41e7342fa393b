// @ts-check

/** An error that says what the visitor can do, with a name: UnverifiedError, DownloadError, MemoryError, InputError. */
export class ModelError extends Error {
  /** @param {string} message @param {string} name */
  constructor(message, name) {
    super(message);
    this.name = name;
  }
}
