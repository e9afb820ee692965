// Search in pages that are opened as files: browsers refuse workers there, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.loaded = new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        script.src = url;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
}
