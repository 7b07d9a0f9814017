// Elements of the page.
export const at = (selector, inside = document) => inside.querySelector(selector);
export const made = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
